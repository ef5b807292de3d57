//! Matrix multiplication of slices, with the `gemm-f32` crate.

pub(crate) use gemm_common::Parallelism;

/// A matrix view of a slice.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a view whose rows of `cols` contiguous values begin `row_stride` apart.
    pub(crate) fn strided(values: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert_inside(values, rows, cols, row_stride);
        Self { values, rows, cols, row_stride, col_stride: 1 }
    }

    /// Creates a view without gaps between rows.
    pub(crate) fn row_major(values: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(values, rows, cols, cols)
    }

    /// Returns the transposed view.
    pub(crate) fn transposed(self) -> Self {
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
pub(crate) enum Into {
    /// out = a · b
    Overwrite,
    /// out += a · b
    Add,
}

/// Computes out (row-major) = or += scale · a · b. The order of summation depends on the shapes only, not on the number of threads.
pub(crate) fn multiply(
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
    let (a, b) = (StridedOperand::of(a), StridedOperand::of(b));
    let out_row_stride = n as isize;
    // The kernels prefer a column-major output. A row-major output with several columns is its transpose: outᵀ = bᵀ · aᵀ.
    let (m, n, out_column, out_row, a, b) =
        if n > 1 { (n, m, out_row_stride, 1, b.transposed(), a.transposed()) } else { (m, n, 1, out_row_stride, a, b) };
    // SAFETY: every element of the three matrices lies in its slice, as `Matrix` and the assertion above check.
    // `out` is borrowed mutably, so it overlaps neither of the others, and its rows do not overlap each other.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            m,
            n,
            k,
            out.as_mut_ptr(),
            out_column,
            out_row,
            into == Into::Add,
            a.first,
            a.column_stride,
            a.row_stride,
            b.first,
            b.column_stride,
            b.row_stride,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// The arguments of a kernel for an operand.
struct StridedOperand {
    first: *const f32,
    column_stride: isize,
    row_stride: isize,
}

impl StridedOperand {
    fn of(matrix: Matrix<'_>) -> Self {
        let Matrix { values, row_stride, col_stride, .. } = matrix;
        Self { first: values.as_ptr(), column_stride: col_stride as isize, row_stride: row_stride as isize }
    }

    fn transposed(self) -> Self {
        Self { column_stride: self.row_stride, row_stride: self.column_stride, ..self }
    }
}
