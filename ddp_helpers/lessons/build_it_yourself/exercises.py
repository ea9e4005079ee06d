"""The exercises of notebook 16, each by the trial that checks it on real ranks.

`lessons.check` reads EXERCISES, in the driver process. The tasks are in the notebook, the answers
in `notebooks/solutions`.
"""

from ddp_helpers.lessons.build_it_yourself import functions, messages, owners, training
from ddp_helpers.lessons.ranks_judge import on_real_ranks

EXERCISES = [
    on_real_ranks(messages.ring_sum, messages.RING_HINTS, sizes=(2, 3, 4)),
    on_real_ranks(training.ddp_by_hand, training.DDP_HINTS),
    on_real_ranks(training.overlap, training.OVERLAP_HINTS),
    on_real_ranks(owners.update_owned),
    on_real_ranks(training.shard_layer, training.LAYER_HINTS),
    on_real_ranks(functions.sync_batch_norm, functions.FUNCTION_HINTS),
    on_real_ranks(functions.parallel_mlp, functions.FUNCTION_HINTS),
    on_real_ranks(messages.pipeline_step, messages.PIPELINE_HINTS),
]
