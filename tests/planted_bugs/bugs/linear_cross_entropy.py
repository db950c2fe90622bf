from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "the last chunk is left out",
        "for start in range(0, tokens, chunk):",
        "for start in range(0, tokens - chunk + 1, chunk):",
    ),
    Bug(
        "every chunk begins the gradient of the weight anew",
        "first=start == 0",
        "first=True",
    ),
    Bug(
        "every chunk takes the first one's factors",
        "logits, grad[part], logits,",
        "logits, grad[: here.shape[0]], logits,",
    ),
    Bug(
        "the gradient of the bias is that of the last chunk",
        "of_bias += logits.sum(0, dtype=of_bias.dtype)",
        "of_bias.copy_(logits.sum(0, dtype=of_bias.dtype))",
    ),
    Bug(
        "the backward leaves the incoming gradient out",
        "y = x * tl.load(factor_ptr)",
        "y = x",
    ),
    Bug(
        "tokens that are ignored count in the mean",
        "total = _mean(total, (targets != ignore_index).sum())",
        "total = total / targets.numel()",
    ),
    Bug(
        "the gradient of no tokens is not a number",
        "torch.where(count == 0, math.nan, total / count.clamp_min(1))",
        "total / count",
    ),
    Bug(
        "the logits of all tokens are there at once",
        "room = hidden.new_empty((min(chunk, tokens), classes))",
        "room = hidden.new_empty((tokens, classes))",
    ),
]
