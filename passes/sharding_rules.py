"""The rule table: how every op that MoE decoders use treats the rows of a batch.

One line per rule. An op's in-place form has the rule of the plain one. Ops in no row are unknown:
users add theirs with `dbo_fx.register_rule`. What the traced models of the test suite contain is
printed and checked by `tests/test_sharding.py`.
"""

from __future__ import annotations

from dbo_fx.passes import sharding_index as index
from dbo_fx.passes import sharding_matmul as product
from dbo_fx.passes import sharding_packing as packing
from dbo_fx.passes import sharding_shapes as shapes
from dbo_fx.rules import REGISTERED, Rule, elementwise

_TABLE: dict[Rule, str] = {
    elementwise: (
        "add sub rsub mul div true_divide floor_divide remainder fmod pow neg abs sign sgn exp exp2"
        " expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan atan2"
        " sinh cosh tanh sigmoid logit erf erfc ceil floor round trunc frac clamp clamp_min"
        " clamp_max clip minimum maximum fmin fmax lerp addcmul addcdiv relu relu6 gelu silu mish"
        " elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign logsigmoid"
        " log_sigmoid prelu threshold eq ne lt le gt ge not_equal less less_equal greater"
        " greater_equal isnan isinf isfinite isposinf isneginf nan_to_num logical_and logical_or"
        " logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__"
        " __xor__ __iand__ __ior__ __ixor__ bitwise_left_shift bitwise_right_shift __lshift__"
        " __rshift__ where masked_fill hypot xlogy positive logaddexp heaviside copysign fill"
        " dropout feature_dropout native_dropout deg2rad real imag float_power isclose multiply"
        " subtract divide negative absolute arctan arcsin arccos fix special_expit"
    ),
    shapes.same: (
        "to _to_copy clone contiguous detach alias lift_fresh lift_fresh_copy type_as wait_tensor"
        " float double half bfloat16 long int bool cpu cuda"
        " resolve_conj resolve_neg conj conj_physical pin_memory"
    ),
    shapes.view: (
        "view reshape flatten unflatten unsqueeze squeeze view_as reshape_as _unsafe_view ravel"
        " _reshape_alias atleast_1d"
    ),
    shapes.moved(shapes.swapped): "transpose swapaxes swapdims",
    shapes.moved(shapes.reversed_dims): "t numpy_T",
    shapes.moved(shapes.last_two): "mT adjoint mH",
    shapes.moved(shapes.permuted): "permute",
    shapes.moved(shapes.movedim): "movedim moveaxis",
    shapes.expanded: "expand expand_as broadcast_to",
    shapes.repeated: "repeat tile",
    shapes.repeat_interleaved: "repeat_interleave",
    shapes.sliced: "slice",
    shapes.narrowed: "narrow",
    shapes.selected: "select",
    shapes.cut(keep=True): "split split_with_sizes chunk tensor_split",
    shapes.cut(keep=False): "unbind",
    shapes.joined(new_dim=False): "cat concat concatenate",
    shapes.joined(new_dim=True): "stack",
    shapes.padded: "pad constant_pad_nd",
    shapes.factory: (
        "zeros ones full empty empty_strided new_zeros new_ones new_full new_empty zeros_like"
        " ones_like full_like empty_like new_empty_strided arange scalar_tensor linspace"
    ),
    shapes.squares: "tril triu eye",
    shapes.reduced(): (
        "sum mean amax amin prod any all var std var_mean std_mean logsumexp argmax argmin max min"
        " median count_nonzero nansum nanmean aminmax norm linalg_vector_norm mode kthvalue"
    ),
    shapes.whole_along("dim", "normalises along"): "softmax log_softmax _softmax _log_softmax",
    shapes.whole_along("dim", "accumulates along", shapes.LOOKS_BACK): (
        "cumsum cumprod cummax cummin logcumsumexp"
    ),
    shapes.whole_along("dim", "sorts"): "sort argsort topk msort",
    shapes.whole_along("dim", "takes differences along", shapes.LOOKS_BACK): "diff",
    shapes.whole_along("dims", "turns round"): "flip roll",
    shapes.last_dims("normalises"): "layer_norm rms_norm native_layer_norm _fused_rms_norm",
    shapes.first_dim_only("normalises groups along"): "group_norm native_group_norm",
    shapes.batch_normed: (
        "batch_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm"
        " _batch_norm_impl_index _native_batch_norm_legit_no_training"
    ),
    shapes.whole_along("dim", "halves"): "glu",
    shapes.convolved: "conv1d conv2d conv3d convolution",
    shapes.one_hot: "one_hot",
    shapes.unused: "_assert_async _assert_tensor_metadata _assert_scalar sym_size",
    product.linear: "linear",
    product.matmul: "matmul mm bmm mv dot vdot",
    product.outer: "outer ger",
    product.matmul_plus("mat1", "mat2"): "addmm",
    product.matmul_plus("batch1", "batch2"): "baddbmm",
    product.matmul_plus("mat", "vec"): "addmv",
    product.einsum: "einsum",
    product.attention: "scaled_dot_product_attention",
    index.embedding: "embedding",
    index.index: "index _unsafe_index",
    index.index_select: "index_select",
    index.gather: "gather take_along_dim",
    index.scatter: "scatter scatter_add scatter_reduce",
    index.index_put_along: "index_copy index_add index_fill",
    index.index_put: "index_put _unsafe_index_put",
    index.searched: "searchsorted bucketize",
}
RULES: dict[str, Rule] = {
    f"aten::{n}": rule for rule, names in _TABLE.items() for n in names.split()
}
RULES["_c10d_functional::wait_tensor"] = shapes.same
RULES |= packing.RULES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What keeps a position a position (see `Split.shift`), and what computes with it.
CARRIES = _names(
    "to _to_copy clone contiguous detach alias view reshape flatten unflatten unsqueeze"
    " squeeze view_as transpose t permute movedim expand expand_as broadcast_to repeat"
    " repeat_interleave slice select cat stack lift_fresh_copy float long int double split"
    " chunk unbind"
)
SUMS = _names("add sub rsub mul div floor_divide remainder eq ne lt le gt ge neg")
LOOKS_UP = _names(
    "embedding index index_select gather scatter scatter_add index_copy index_add index_fill"
    " index_put _unsafe_index"
)
# Ops whose result depends on sizes and dtype of their tensors alone.
SHAPE_ONLY = _names(
    "zeros_like ones_like empty_like new_zeros new_ones new_empty new_full new_empty_strided"
    " full_like sym_size _assert_tensor_metadata"
)
# Ops that may take the batch size without computing a value from it.
TAKES_SIZES = SHAPE_ONLY | _names(
    "view reshape flatten unflatten expand broadcast_to repeat tile zeros ones full empty"
    " slice narrow split split_with_sizes chunk tensor_split arange combine all_to_all_single"
    " _unsafe_view all_gather_into_tensor reduce_scatter_tensor one_hot empty_strided"
    " _assert_scalar pad eye repeat_interleave"
)
# Between dispatch and combine rows may be put in another order by these.
ORDERS = _names("sort argsort cumsum sum bincount histc searchsorted count_nonzero")
MOVES = _names(
    "index index_select gather _grouped_mm grouped_mm index_put index_copy index_add scatter"
    " scatter_add bincount histc"
)
DECIDES = _names("lt le gt ge clamp clamp_min clamp_max minimum maximum where")


def rule_of(op: str) -> Rule | None:
    """The rule of an op by its qualified name, a user's own first; None for unknown ops."""
    return REGISTERED.get(op) or RULES.get(op) or RULES.get(_plain_name(op))


def _plain_name(op: str) -> str:
    """The name of an in-place op without its trailing underscore."""
    return op[:-1] if op.endswith("_") and not op.endswith("__") else op
