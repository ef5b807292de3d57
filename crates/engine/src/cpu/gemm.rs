//! Matrix multiplication of slices, with the `gemm` crate.

pub(super) use gemm::Parallelism;

/// A matrix view of a slice.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a view whose rows of `cols` contiguous values begin `row_stride` apart.
    pub(super) fn strided(values: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert_inside(values, rows, cols, row_stride);
        Self { values, rows, cols, row_stride, col_stride: 1 }
    }

    /// Creates a view without gaps between rows.
    pub(super) fn row_major(values: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(values, rows, cols, cols)
    }

    /// Returns the transposed view.
    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            values: self.values,
        }
    }
}

fn assert_inside(values: &[f32], rows: usize, cols: usize, row_stride: usize) {
    assert!(cols <= row_stride, "rows of {cols} overlap at stride {row_stride}");
    assert!(
        rows == 0 || cols == 0 || (rows - 1) * row_stride + cols <= values.len(),
        "{rows} rows of {cols} at stride {row_stride} in {} values",
        values.len()
    );
}

/// Determines whether results replace or add to the output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    /// out = a · b
    Overwrite,
    /// out += a · b
    Add,
}

/// Computes out (row-major) = or += scale · a · b. The order of summation depends on the shapes only, not on the number of threads.
pub(super) fn multiply(
    out: &mut [f32],
    into: Into,
    scale: f32,
    a: Matrix<'_>,
    b: Matrix<'_>,
    parallelism: Parallelism,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(b.rows, k, "inner dimensions of a matrix multiplication");
    assert_inside(out, m, n, n);
    if m == 0 || n == 0 {
        return;
    }
    // SAFETY: every element of the three matrices lies in its slice, as `Matrix` and the assertion above check.
    // `out` is borrowed mutably, so it overlaps neither of the others, and its rows do not overlap each other.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            into == Into::Add,
            a.values.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.values.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
