# Images for training with megatron-p3o; docs/install.md says how to build and start them.
#
#   docker build --target gpu --tag megatron-p3o:gpu .
#   docker build --target cpu --tag megatron-p3o:cpu .
#
# Versions are those of docs/support.md. Neither image was built by the test suite, which reads this
# file only (tests/unit/test_dockerfile.py).

# NVIDIA's image: CUDA, NCCL, torch, Transformer Engine, Python 3.12.
ARG NGC_TAG=26.05-py3
ARG PYTHON_TAG=3.11-slim-bookworm

FROM nvcr.io/nvidia/pytorch:${NGC_TAG} AS gpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
ARG SGLANG=0.5.23
ARG SGLANG_ROUTER=0.3.2
# SGLang's torch is another one than the image's, so it lives in an environment of its own, without
# the image's constraints.
RUN python -m venv /opt/sglang \
    && env -u PIP_CONSTRAINT /opt/sglang/bin/pip install --no-cache-dir \
        "sglang==${SGLANG}" "sglang-router==${SGLANG_ROUTER}" \
    && /opt/sglang/bin/python -c "import importlib.metadata as m; print(m.version('sglang'))"
# 1 builds NVIDIA's Apex (tens of minutes). Transformer Engine brings what training here uses.
ARG APEX=0
ARG APEX_COMMIT=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
RUN if [ "${APEX}" = 1 ]; then \
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-cache-dir --no-build-isolation \
            "apex @ git+https://github.com/NVIDIA/apex.git@${APEX_COMMIT}"; \
    fi
ARG MEGATRON_CORE=0.19.2
WORKDIR /opt/megatron-p3o
COPY pyproject.toml README.md LICENSE ./
COPY megatron_p3o megatron_p3o
COPY tools tools
COPY examples examples
# The image's constraints keep its own torch; the check fails the build where pip replaced it.
RUN torch=$(python -c "import torch; print(torch.__version__)") \
    && pip install --no-cache-dir "megatron-core==${MEGATRON_CORE}" ".[tensorboard,ray]" \
    && test "$(python -c 'import torch; print(torch.__version__)')" = "${torch}" \
    && useradd --uid 10001 --create-home p3o \
    && install --directory --owner p3o /work
# Mounted run dirs belong to whoever started the container; docker run --user says who that is.
USER p3o
WORKDIR /work
ENTRYPOINT ["p3o"]
CMD ["doctor", "--sglang-python", "/opt/sglang/bin/python"]

FROM python:${PYTHON_TAG} AS cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# make runs the targets below; git and compilers are not needed. Debian keeps one version of a
# package at a time, so a pinned one would end the build at its next update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home p3o \
    && install --directory --owner p3o /opt/megatron-p3o
USER p3o
WORKDIR /opt/megatron-p3o
ENV PIP_NO_CACHE_DIR=1
COPY --chown=p3o . .
RUN make venv model
# 1 adds SGLang's CPU server (2.7 GB).
ARG SGLANG=0
RUN if [ "${SGLANG}" = 1 ]; then make sglang; fi
ENV PATH=/opt/megatron-p3o/.venv-3.11/bin:${PATH}
ENTRYPOINT ["p3o"]
CMD ["doctor"]
