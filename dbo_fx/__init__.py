"""dbo_fx: Dual Batch Overlap for Mixture-of-Experts inference, done at compile time.

Names load on first use, so that looking at schedules needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbo_fx.backend import compilations, compile_graph
    from dbo_fx.batch_metadata import MetadataBuilder
    from dbo_fx.buckets import Bucket, GraphOptions
    from dbo_fx.capture import CapturedGraph, trace
    from dbo_fx.compiled import CompiledProgram
    from dbo_fx.decision import AgreementPolicy, BatchKind
    from dbo_fx.errors import DboError
    from dbo_fx.features import EngineFeatures
    from dbo_fx.graph_file import load_graph, save_graph
    from dbo_fx.graphs import CudaGraphs
    from dbo_fx.inspect.diff import diff
    from dbo_fx.inspect.simulation import efficiency, simulate
    from dbo_fx.inspect.write_timeline import timeline
    from dbo_fx.ir import Program, Schedule
    from dbo_fx.opaque import register_local
    from dbo_fx.options import Options
    from dbo_fx.packing import overflow
    from dbo_fx.rules import elementwise, register_rule, replicated, row_wise
    from dbo_fx.saved import load, save
    from dbo_fx.split import SplitSpec
    from dbo_fx.wrapping import wrap

__version__ = "0.1.0"
__all__ = [
    "AgreementPolicy",
    "BatchKind",
    "Bucket",
    "CapturedGraph",
    "CompiledProgram",
    "CudaGraphs",
    "DboError",
    "EngineFeatures",
    "GraphOptions",
    "MetadataBuilder",
    "Options",
    "Program",
    "Schedule",
    "SplitSpec",
    "compilations",
    "compile_graph",
    "diff",
    "efficiency",
    "elementwise",
    "load",
    "load_graph",
    "overflow",
    "register_local",
    "register_rule",
    "replicated",
    "row_wise",
    "save",
    "save_graph",
    "simulate",
    "timeline",
    "trace",
    "wrap",
]

_HOME = {
    "AgreementPolicy": "decision",
    "BatchKind": "decision",
    "Bucket": "buckets",
    "CapturedGraph": "capture",
    "CompiledProgram": "compiled",
    "CudaGraphs": "graphs",
    "DboError": "errors",
    "EngineFeatures": "features",
    "GraphOptions": "buckets",
    "MetadataBuilder": "batch_metadata",
    "Options": "options",
    "Program": "ir",
    "Schedule": "ir",
    "SplitSpec": "split",
    "compilations": "backend",
    "compile_graph": "backend",
    "diff": "inspect.diff",
    "efficiency": "inspect.simulation",
    "elementwise": "rules",
    "load": "saved",
    "load_graph": "graph_file",
    "overflow": "packing",
    "register_local": "opaque",
    "register_rule": "rules",
    "replicated": "rules",
    "row_wise": "rules",
    "simulate": "inspect.simulation",
    "timeline": "inspect.write_timeline",
    "save": "saved",
    "save_graph": "graph_file",
    "trace": "capture",
    "wrap": "wrapping",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module 'dbo_fx' has no attribute {name!r}")
    value = getattr(import_module(f"dbo_fx.{_HOME[name]}"), name)
    globals()[name] = value
    return value
