#!/usr/bin/env bash
# Installs the missing tools for GPU kernels: the device toolchain, and ptxas, cuobjdump and nvdisasm into a directory. It can be run again
# at any time. It needs PyPI, and apt (as root or with sudo) or a rustup with network access.
#   setup.sh DIRECTORY
# scripts/setup of the repository sources this file and calls its functions; `cargo kernels setup` runs it.
set -euo pipefail

nightly=nightly-2026-05-20 # the same as NIGHTLY in crates/cuda_builder
cuda_version=13.5.37       # version of the wheels nvidia-cuda-nvcc, nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm
rustup_timeout=300         # seconds; without network access, rustup may retry forever

say() { printf '%-18s %s\n' "$1" "$2"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}
# Makes the next build search for the tools again.
mark_changed() {
    local user=${CUDA_BUILDER_TOOLS:-${XDG_DATA_HOME:-$HOME/.local/share}/cuda_builder}
    mkdir -p "$tools" && date +%s%N >"$tools/changed"
    [ ! -d "$user" ] || date +%s%N >"$user/changed"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        fail "cannot run '$*': run this script as root, or install sudo"
    fi
}

apt_updated=
apt_update() {
    [ -z "$apt_updated" ] || return 0
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq || fail "apt-get update failed; see above"
    apt_updated=yes
}
apt_install() {
    command -v apt-get >/dev/null || fail "no apt-get found: install $* manually, then run this script again"
    apt_update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        fail "apt-get install $* failed; see above"
}

# Succeeds if the toolchain under prefix $1 is complete, by the same rules as Toolchain::find in crates/cuda_builder.
is_complete() {
    local about llvm host sysroot bin tool release
    [ -x "$1/bin/rustc" ] && [ -x "$1/bin/cargo" ] || return 1
    about=$("$1/bin/rustc" -vV) || return 1
    release=$(sed -n 's/^release: //p' <<<"$about")
    printf '1.96.0\n%s\n' "${release%%-*}" | sort -CV || return 1
    sysroot=$("$1/bin/rustc" --print sysroot)
    [ -e "$sysroot/lib/rustlib/src/rust/library/core/src/lib.rs" ] || return 1
    llvm=$(sed -n 's/^LLVM version: \([0-9]*\).*/\1/p' <<<"$about")
    host=$(sed -n 's/^host: //p' <<<"$about")
    for bin in "$sysroot/lib/rustlib/$host/bin" "$1/lib/llvm-$llvm/bin"; do
        local missing=
        for tool in llvm-link llvm-dis opt llc; do [ -x "$bin/$tool" ] || missing=yes; done
        [ -n "$missing" ] || return 0
    done
    return 1
}

device_toolchain() {
    local rustup_toolchain
    rustup_toolchain=${RUSTUP_HOME:-$HOME/.rustup}/toolchains/$nightly-$(uname -m)-unknown-linux-gnu
    if is_complete "$rustup_toolchain"; then
        say "device toolchain" "$rustup_toolchain"
        return
    fi
    if is_complete /usr; then
        say "device toolchain" "$(/usr/bin/rustc --version)"
        return
    fi
    if command -v rustup >/dev/null && timeout "$rustup_timeout" rustup toolchain install "$nightly" --profile minimal \
        -c rust-src -c llvm-tools -c llvm-bitcode-linker >/dev/null 2>&1 && is_complete "$rustup_toolchain"; then
        mark_changed
        say "device toolchain" "installed $rustup_toolchain"
        return
    fi
    apt_install rustc-web cargo-web rust-web-src
    local llvm
    llvm=$(/usr/bin/rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
    apt_install "llvm-$llvm"
    is_complete /usr || fail "device toolchain in /usr: expected rustc 1.96 or later with llvm-$llvm, found $(/usr/bin/rustc --version);" \
        "rustc-web, cargo-web, rust-web-src and llvm-$llvm are installed"
    mark_changed
    say "device toolchain" "installed $(/usr/bin/rustc --version), llvm-$llvm"
}

cuda_tools() {
    local bin=$tools/cuda/nvidia/cu${cuda_version%%.*}/bin tool missing=
    for tool in ptxas cuobjdump nvdisasm; do [ -x "$bin/$tool" ] || missing=yes; done
    if [ -n "$missing" ]; then
        local python=/usr/bin/python3
        [ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1 || apt_install python3 python3-pip
        # Installs into a temporary directory first, so that an interrupted run leaves no incomplete installation.
        mkdir -p "$tools"
        staging=$(mktemp -d "$tools/cuda.XXXXXX")
        chmod 755 "$staging"
        trap 'rm -rf "$staging"' EXIT
        "$python" -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps --target "$staging" \
            "nvidia-cuda-nvcc==$cuda_version" "nvidia-cuda-cuobjdump==$cuda_version" \
            "nvidia-cuda-nvdisasm==$cuda_version" ||
            fail "pip could not install nvidia-cuda-nvcc, -cuobjdump and -nvdisasm $cuda_version; see above. Without them the" \
                "build succeeds, but builds no cubins"
        rm -rf "$tools/cuda"
        mv "$staging" "$tools/cuda"
        chmod +x "$bin"/*
        mark_changed
    fi
    for tool in ptxas cuobjdump nvdisasm; do
        [ -x "$bin/$tool" ] || fail "the wheels of version $cuda_version contain no $bin/$tool"
        say "$tool" "$bin/$tool"
    done
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    tools=${1:?expected the directory for the tools}
    device_toolchain
    cuda_tools
fi
