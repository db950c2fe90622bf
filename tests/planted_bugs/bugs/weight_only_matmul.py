from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "the scale is forgotten on the way back",
        "multiply(*batched, depth_scale=scale)",
        "multiply(*batched)",
    ),
    Bug(
        "the scale multiplies the wrong side of the gradient",
        "multiply(*batched, depth_scale=scale)",
        "multiply(*batched, row_scale=scale[: grad.shape[0]])",
    ),
    Bug(
        "the weight is taken for its transpose",
        "weight.mT.unsqueeze(0), out.unsqueeze(0))",
        "weight.reshape(weight.shape[::-1]).unsqueeze(0), out.unsqueeze(0))",
    ),
    Bug(
        "all columns have the scale of the first",
        "multiply(*batched, column_scale=scale, bias=bias)",
        "multiply(*batched, column_scale=scale[:1], bias=bias)",
    ),
    Bug(
        "the bias is forgotten",
        "multiply(*batched, column_scale=scale, bias=bias)",
        "multiply(*batched, column_scale=scale)",
    ),
    Bug(
        "the gradient of the bias is that of one row",
        "grad.sum(0, dtype=torch.float32)",
        "grad[:1].sum(0, dtype=torch.float32)",
    ),
]
