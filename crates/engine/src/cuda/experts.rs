//! Mixtures of experts, and norms of all heads together, for which there are no kernels yet.

use crate::Result;
use crate::ops::QkNormScope;
use anyhow::ensure;

/// Checks that there are kernels for a model or an operation.
pub(super) fn check(has_experts: bool, qk_norm: Option<QkNormScope>) -> Result<()> {
    for (what, is_missing) in
        [("experts", has_experts), ("QK-norm of all heads", qk_norm == Some(QkNormScope::AllHeads))]
    {
        ensure!(
            !is_missing,
            "{what}: expected the CPU engine, found a GPU, which has no kernels for this yet; use --device cpu"
        );
    }
    Ok(())
}
