# Penstock in a container. Two images from one file:
#   docker build --target cpu -t penstock:cpu .
#   docker build --target cuda -t penstock:cuda .        run it with: docker run --gpus all
# Runs are written to /runs: mount a folder of yours there, with --user "$(id -u):$(id -g)".

FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 HF_HOME=/cache/huggingface XDG_CONFIG_HOME=/config
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home penstock \
    && mkdir -p /runs /cache /config \
    && chown penstock /runs /cache /config
WORKDIR /opt/penstock
COPY pyproject.toml README.md LICENSE constraints.txt hashes.txt ./
COPY scripts/locked_install.py scripts/
COPY src src

# The CPU build of torch is on its makers' own index, whose files are not in hashes.txt: give that index as
# --build-arg TORCH_INDEX=URL and the SHA-256 of the wheel, which the index shows, as TORCH_SHA256. Without them the
# image holds the CUDA build, which works too and is larger.
FROM base AS cpu
ARG TORCH_INDEX="" TORCH_SHA256=""
RUN if [ -n "$TORCH_INDEX" ]; then \
        echo "$(grep '^torch==' constraints.txt) --hash=sha256:$TORCH_SHA256" > /tmp/torch.txt \
        && python -m pip install --index-url "$TORCH_INDEX" --require-hashes --no-deps -r /tmp/torch.txt; \
    fi \
    && python scripts/locked_install.py lora
USER penstock
WORKDIR /runs
ENTRYPOINT ["penstock"]
CMD ["--help"]

# CUDA comes with the wheels. Triton compiles its launchers, for which it needs a C compiler.
FROM base AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python scripts/locked_install.py lora
USER penstock
WORKDIR /runs
ENTRYPOINT ["penstock"]
CMD ["--help"]
