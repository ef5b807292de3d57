//! The tests of all exercises.

mod activation_memory;
mod adamw_bias_correction;
mod attention_row_term;
mod column_sums;
mod cross_entropy_padding;
mod gelu_slope;
mod layernorm_variance;
mod linear_gradient;
mod model_flops;
mod occupancy;
mod online_softmax_merge;
mod ring_all_reduce;
mod rstd_gradient;
mod scan_race;
mod sectors;
mod shard_boundaries;
mod shared_tile_gemm;
mod stochastic_rounding;
mod token_order;
mod warp_argmax;
mod wave_quantization;
mod xor_swizzle;

/// The chapter about the exercises lists all of them.
#[test]
fn the_book_lists_every_exercise() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let chapter = std::fs::read_to_string(root.join("../chapters/exercises.md")).unwrap();
    for path in std::fs::read_dir(root.join("src")).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(
            name == "lib" || chapter.contains(&format!("/{name}.rs)")),
            "{name}: expected it in exercises.md, found nothing"
        );
    }
}
