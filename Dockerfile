# Every node of a cluster from one image: SGLang's own, and this package with its Ray in the same Python.
#   docker build -t registry.example.com/hsdump:0.1.0 .
# Run it with room for tensors: --gpus all --shm-size=400g --ulimit memlock=-1 --ulimit nofile=65536:65536
FROM lmsysorg/sglang:v0.5.23
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/hsdump
COPY . .
# The image's SGLang and PyTorch stay as they are: pip fails here rather than replacing them.
RUN python3 -m pip freeze | grep -iE '^(sglang|torch)==' > /tmp/keep.txt \
    && python3 -m pip install --no-cache-dir -c /tmp/keep.txt '.[service,cloud]' \
    && ray --version && hsdump --help > /dev/null
WORKDIR /work
