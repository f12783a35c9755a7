"""The `dbo-fx` command. Data goes to stdout, messages to stderr; exit 0 ok, 1 failed, 2 usage.

Each command is a file of `dbo_fx/commands`, which imports what it needs when it runs: `show` of a
text starts without torch.
"""

from __future__ import annotations

import sys

try:
    import typer
except ModuleNotFoundError as missing:
    sys.stderr.write("dbo-fx: the command needs typer; pip install 'dbo-fx[cli]'\n")
    raise SystemExit(2) from missing

from dbo_fx.commands.check import check
from dbo_fx.commands.demo import demo
from dbo_fx.commands.diff import diff
from dbo_fx.commands.doctor import doctor
from dbo_fx.commands.explain import explain
from dbo_fx.commands.show import show

app = typer.Typer(
    name="dbo-fx",
    help="Dual Batch Overlap for Mixture-of-Experts models, scheduled at compile time.",
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (show, explain, check, diff, doctor, demo):
    app.command()(_command)


def main() -> None:
    """Run the command line; the entry point of the `dbo-fx` script."""
    app(prog_name="dbo-fx")


if __name__ == "__main__":
    main()
