"""What torch functions do to the neurons that go through them, by name."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    "flatten unflatten view reshape view_as reshape_as transpose permute movedim swapaxes swapdims t "
    "T mT squeeze unsqueeze expand expand_as broadcast_to cat concat concatenate stack hstack chunk "
    "split split_with_sizes unbind __getitem__ select narrow repeat tile clone contiguous detach "
    "data flip roll "
)
"""Numbers keep their values and get other places."""

UNARY = _names(
    "relu relu_ leaky_relu leaky_relu_ elu elu_ selu celu gelu silu silu_ tanh tanh_ sigmoid "
    "sigmoid_ softplus softsign hardtanh relu6 hardswish hardsigmoid mish logsigmoid rrelu dropout "
    "dropout_ alpha_dropout dropout1d dropout2d dropout3d feature_dropout neg __neg__ abs square "
    "sqrt rsqrt exp log sin cos clamp clamp_ float double half bfloat16 to type type_as pow __pow__ "
    "threshold tanhshrink softshrink hardshrink cpu cuda erf sign requires_grad_ identity log1p "
    "expm1 "
)
"""Each number becomes a function of itself."""

BINARY = _names(
    "add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ rsub mul mul_ __mul__ "
    "__rmul__ __imul__ div div_ true_divide __truediv__ __itruediv__ maximum minimum where lerp "
    "prelu "
)
"""Each number becomes a function of those at the same place."""

POOLS = _names(
    "max_pool1d max_pool2d max_pool3d _max_pool1d _max_pool2d _max_pool3d avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d _adaptive_max_pool2d boolean_dispatch fn mean amax interpolate upsample pad "
)
"""Numbers of one neuron at several places become one, or are repeated."""

READS = _names("item tolist numpy __bool__ __float__ __int__ __index__ ")
"""Numbers leave torch."""

LINEAR = _names(
    "scale dropout dropout_ dropout1d dropout2d dropout3d feature_dropout neg __neg__ "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d mean avg_pool1d avg_pool2d "
    "avg_pool3d float double to type "
)
"""f(c z) = c f(z) for every c, in evaluation."""
ODD = LINEAR | {"tanh", "tanh_", "add"}
"""f(-z) = -f(z)."""
HOMOGENEOUS = LINEAR | {
    "add",
    "relu",
    "relu_",
    "leaky_relu",
    "leaky_relu_",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "pad",
}
"""f(c z) = c f(z) for positive c."""
EVEN_SUM = LINEAR | {"sigmoid", "sigmoid_"}
"""f(-z) = 1 - f(z), if there is one sigmoid."""


def kind_of(name: str, labelled: int) -> str:
    """The name under which an operation of one or several neurons is remembered."""
    base = name.strip("_").removeprefix("i").removeprefix("r") if name.startswith("__") else name.rstrip("_")
    if base in ("add", "sub"):
        return "add" if labelled > 1 else "shift"
    if base in ("mul", "div", "truediv", "true_divide"):
        return "product" if labelled > 1 else "scale"
    return base.removeprefix("_") if name in POOLS else name.rstrip("_")
