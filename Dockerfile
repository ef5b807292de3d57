# Builds llm-rs with machine code for the GPU, and an image that runs it. The build needs no GPU.
#
#     docker build -t llm-rs .
#     docker run --rm llm-rs train                                        # on the CPU
#     docker run --rm --gpus all -v "$PWD/runs:/runs" llm-rs train --out /runs/small
#     docker run --rm --gpus all -v "$PWD/runs:/runs" -p 127.0.0.1:8080:8080 llm-rs serve /runs/small --host 0.0.0.0

FROM rust:1.95-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
# The tools depend on three files only, so that changes of the sources do not install them again.
COPY rust-toolchain.toml ./
COPY scripts/setup scripts/
COPY crates/cargo-kernels/setup.sh crates/cargo-kernels/
RUN scripts/setup
COPY . .
RUN LLM_RS_CUBINS=all CUDA_HOME=/src/.tools/cuda/nvidia/cu13 cargo build --release --locked -p host \
    && strip target/release/llm-rs

FROM debian:bookworm-slim
# cuBLASLt and NCCL of the wheels, which the program loads if there is a GPU. `docker build --build-arg GPU_LIBRARIES=` leaves them out.
ARG GPU_LIBRARIES="nvidia-cublas nvidia-nccl-cu13"
# The newest versions of Debian's packages, and of libraries that fit the newest driver.
# hadolint ignore=DL3008,DL3013
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip \
    && rm -rf /var/lib/apt/lists/* \
    && if [ -n "$GPU_LIBRARIES" ]; then \
        for library in $GPU_LIBRARIES; do \
            pip install --no-cache-dir --break-system-packages --root-user-action=ignore "$library" || exit 1; \
        done; \
    fi \
    && useradd --create-home --uid 1000 llm
COPY --from=build /src/target/release/llm-rs /src/scripts/several_gpus /src/scripts/restarts /usr/local/bin/
# The NVIDIA container toolkit mounts the driver of the host.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/llm
EXPOSE 8080
ENTRYPOINT ["llm-rs"]
CMD ["doctor"]
