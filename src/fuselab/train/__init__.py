"""The parts that every training run needs: the loop, schedules, metrics, progress, checkpoints."""
