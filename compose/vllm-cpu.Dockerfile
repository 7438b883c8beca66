# vLLM for the CPU, as integration/engines/setup.sh installs it, and a tiny model with random weights.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
# Indexes in place of pypi.org, and beside it.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# g++ is what torch compiles with at run time; the others are Mooncake's.
RUN apt-get update -q && apt-get install -y -q --no-install-recommends \
      python3-dev g++ libgomp1 libibverbs1 librdmacm1 libnuma1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*
COPY integration/engines/ /opt/recipe/
COPY image/ /opt/recipe/image/
RUN find /etc/ssl/certs/ca-certificates.crt /opt/recipe/image -name '*.crt' -exec cat {} + > /tmp/ca.pem \
    && PIP_CERT=/tmp/ca.pem PIP_NO_CACHE_DIR=1 /opt/recipe/setup.sh /opt/engines vllm \
    && rm -r /tmp/ca.pem /opt/recipe \
    # Weights are written for their owner only, and the server is somebody else.
    && chmod -R a+rX /opt/engines/model \
    && install -d -o 10001 -g 10001 /models
ENV HOME=/tmp HF_HOME=/models VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    VLLM_ENABLE_V1_MULTIPROCESSING=0 UCX_TLS=tcp,sm,self
USER 10001:10001
ENTRYPOINT ["/opt/engines/venv-vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]
