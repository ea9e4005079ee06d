from ddp_helpers.lessons.shard_the_data.figures import global_batch as global_batch  # notebook 06 shows it, too
