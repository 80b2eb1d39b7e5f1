"""The optimizer's step for states that live on the host: in windows, or stepped by the CPU."""
