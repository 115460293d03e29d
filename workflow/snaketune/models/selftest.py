"""Before anything trains: does the packed forward see exactly what separate forwards see, with this model and kernel?"""

import torch
from transformers import PreTrainedModel

from snaketune.errors import SnaketuneError
from snaketune.models.attention import use_segment_attention
from snaketune.models.batches import collate, forward_inputs
from snaketune.packing.reader import PackedRows

SEGMENTS_COMPARED = 16
# Largest accepted difference, as a share of the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@torch.no_grad()
def check_packed_equals_separate(model: PreTrainedModel, rows: PackedRows, kernel: str, dtype: torch.dtype) -> float:
    """Compare logits of the rows' first segments with those of each sequence run alone by the model's own attention.

    Returns:
        The largest difference, as a share of the largest logit.
    Raises:
        SnaketuneError: it is larger than rounding explains.
    """
    device = model.device
    training = model.training
    model.eval()
    row = rows[0]
    batch = {
        name: value.to(device) if hasattr(value, "to") else value for name, value in collate([row], kernel).items()
    }
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        use_segment_attention(model)
        inputs = forward_inputs(batch) | {"logits_to_keep": 0}
        packed_TV = model(**inputs).logits[0].float()
        model.set_attn_implementation("sdpa")
        worst, largest, at = 0.0, 1e-9, 0
        prefix_owner = 0
        for length, prefix in list(zip(row["segment_lengths"].tolist(), row["prefix_lengths"].tolist()))[
            :SEGMENTS_COMPARED
        ]:
            if not prefix:
                prefix_owner = at
            tokens = torch.cat(
                [batch["input_ids"][:, prefix_owner : prefix_owner + prefix], batch["input_ids"][:, at : at + length]],
                dim=1,
            )
            alone_LV = model(input_ids=tokens, use_cache=False).logits[0, prefix:].float()
            worst = max(worst, (packed_TV[at : at + length] - alone_LV).abs().max().item())
            largest = max(largest, alone_LV.abs().max().item())
            at += length
    use_segment_attention(model)
    model.train(training)
    share = worst / largest
    if not share <= TOLERANCE[dtype]:
        raise SnaketuneError(
            f"self-test failed: with kernel {kernel} in {dtype}, packed logits differ from separate ones by {share:.2e} of "
            f"the largest (at most {TOLERANCE[dtype]:.0e} is rounding). Documents may see each other; nothing was trained"
        )
    print(
        f"self-test: packed = separate within {share:.1e} of the largest logit (kernel {kernel}, {dtype})", flush=True
    )
    return share
