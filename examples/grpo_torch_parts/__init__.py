"""What examples/grpo_torch.py needs besides refit: task, policy, objectives, processes, output."""
