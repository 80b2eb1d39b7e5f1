"""Stands for vLLM, of which SGLang 0.5.23 imports one name on a machine without a GPU."""
