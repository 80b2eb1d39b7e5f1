# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
versions="0.5.23"
megabytes=6500
minutes="3 11"

# SGLang's own list of requirements is for GPUs (more than 15 GB): here is what it imports on a CPU,
# with its own pins. Two modules are absent, and need not be there: sgl_kernel, which is imported on
# GPUs alone, and vLLM's kernels, of which it imports one name (stubs/vllm/_custom_ops.py).
install() {
    "$pip" -q install --no-deps "sglang==$1" compressed-tensors==0.18.0 peft==0.21.0 accelerate==1.15.0 &&
        "$pip" -q install torch==2.14.1 torchaudio==2.11.0 torchvision==0.29.1 transformers==5.19.0 tokenizers==0.23.2 \
            apache-tvm-ffi==0.1.11 openai==2.8.0 xgrammar==0.2.7 sentencepiece aiohttp dill distro einops fastapi gguf ipython loguru \
            msgspec numpy orjson packaging partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart \
            jsonschema pyzmq requests safetensors setproctitle soundfile uvicorn uvloop
}
