//! Host side: the kernel for a GEMM.

use super::epilogue::Buffers;
use super::kernel::{matmul_mma_exists, matmul_mma_select};
use super::mainloop::{Operand, TILE};
use crate::launch::{KernelLaunch, shared_bytes};
use crate::matmul::gemm::{Batching, Gemm, GemmEpilogue, GemmLayout, GemmOutput, GemmPrecision};
use crate::matmul::launch::{KernelOperands, TileConfig, TileShape, has_valid_shape};
use cuda_std::fp8::Fp8Format;
use cuda_std::{Global, GlobalMut};

/// The only tile configuration.
pub const CONFIG: TileConfig = TileConfig { tile: TileShape::T128x128, split_k: 1 };

/// The addresses of the matrices for which a wgmma kernel takes tensor maps. Those that the epilogue does not use may be arbitrary.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addresses {
    /// Address of a.
    pub a: u64,
    /// Address of b.
    pub b: u64,
    /// Address of the residual, or of the preactivation of a backward pass.
    pub aux: u64,
    /// Address of the preactivation of a forward pass.
    pub second: u64,
}

/// Returns true if a kernel computes a GEMM. An f32 output must be the residual.
pub fn is_supported(gemm: &Gemm) -> bool {
    has_valid_shape(gemm) && key(gemm).is_some_and(matmul_mma_exists)
}

/// Returns the key of the kernel instance.
fn key(gemm: &Gemm) -> Option<(Fp8Format, GemmEpilogue, GemmOutput)> {
    let GemmPrecision::Fp8 { a, .. } = gemm.precision else { return None };
    let epilogue = GemmEpilogue { output: GemmOutput::Storage, ..gemm.epilogue };
    let fits = gemm.layout == GemmLayout::Nt && gemm.batching == Batching::One;
    fits.then_some((a, epilogue, gemm.epilogue.output))
}

/// Returns the launch of a GEMM. The GEMM must be supported.
///
/// # Panics
/// Panics if there is no kernel.
pub fn launch(gemm: &Gemm, Addresses { a, b, aux, second }: Addresses, operands: KernelOperands) -> KernelLaunch {
    let KernelOperands { bias, scales: [scale_a, scale_b], scale_out, amax, out_address: out, .. } = operands;
    let columns = match gemm.precision {
        GemmPrecision::Fp8 { columns, .. } => columns.unwrap_or(0),
        _ => 0,
    };
    let launch = key(gemm).and_then(|key| {
        matmul_mma_select(
            key,
            Global::from_address(a),
            Global::from_address(b),
            GlobalMut::from_address(out),
            Global::from_address(aux),
            GlobalMut::from_address(second),
            bias.reader(),
            scale_a,
            scale_b,
            scale_out,
            amax,
            GlobalMut::from_address(out),
            operands.transposed,
            operands.activation,
            operands.scale_activation,
            GlobalMut::from_address(out),
            gemm.m as u32,
            gemm.n as u32,
            gemm.k as u32,
            columns,
        )
    });
    let stages = shared_bytes(|layout| [(); 2].map(|()| Operand::new(layout, Global::null(), 0, 0, 0)));
    KernelLaunch {
        launch: launch.unwrap_or_else(|| panic!("{gemm}: expected a GEMM with a kernel")),
        grid: [CONFIG.tile.tiles(gemm.m, gemm.n) as u32, 1, 1],
        shared_bytes: stages.max(shared_bytes(Buffers::new)),
    }
}

const _: () = assert!(TILE == CONFIG.tile.dims()[0] as usize && TILE == CONFIG.tile.dims()[1] as usize);
