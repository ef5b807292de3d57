//! Text output of kernels, for debugging: [`gpu_println!`](crate::gpu_println).
//!
//! On the device this is `vprintf`: the driver prints the text when the host synchronizes. In the emulator it goes to stdout at once.

/// Prints a line from a kernel: `gpu_println!("sum of row {}: {}", row, sum)`.
///
/// `{}` stands for an argument of type u8 to u64, i8 to i64, usize, f32, f64 or bool. Other formats are errors. A GPU prints floating-point
/// numbers with up to nine (f32) or seventeen (f64) significant digits. The buffer of the driver holds about 1 MB; it drops older text.
/// ```
/// use cuda_std::{gpu_println, kernel, thread};
///
/// #[kernel(threads = 32)]
/// fn shows(x: f32) {
///     if thread::thread_idx_x() == 3 {
///         gpu_println!("thread {} has {}", thread::thread_idx_x(), x);
///     }
/// }
/// ```
///
/// The number of arguments is checked:
/// ```compile_fail
/// cuda_std::gpu_println!("{} {}", 1u32);
/// ```
#[macro_export]
macro_rules! gpu_println {
    ($text:literal $(, $argument:expr)* $(,)?) => {{
        struct Text;
        impl $crate::print::Text for Text {
            const TEXT: &'static str = $text;
        }
        $crate::print::line::<Text, _>(($($argument,)*));
    }};
}

/// The text of a line.
#[doc(hidden)]
pub trait Text {
    const TEXT: &'static str;
}

/// A value that can be printed.
#[doc(hidden)]
pub trait Print: Copy {
    /// The conversion of `printf`.
    const CONVERSION: &'static str;
    /// The type as which C passes a variadic argument.
    type Passed: Copy;
    fn passed(self) -> Self::Passed;
}

macro_rules! print {
    ($($type:ty, $conversion:literal, $passed:ty;)*) => {$(
        impl Print for $type {
            const CONVERSION: &'static str = $conversion;
            type Passed = $passed;
            #[inline(always)]
            fn passed(self) -> $passed {
                self as $passed
            }
        }
    )*};
}

print! {
    u8, "%u", u32;
    u16, "%u", u32;
    u32, "%u", u32;
    i8, "%d", i32;
    i16, "%d", i32;
    i32, "%d", i32;
    u64, "%llu", u64;
    i64, "%lld", i64;
    usize, "%llu", u64;
    f32, "%.9g", f64;
    f64, "%.17g", f64;
    bool, "%d", i32;
}

/// The arguments of a line.
#[doc(hidden)]
pub trait Arguments: Copy {
    /// Their conversions.
    const CONVERSIONS: &'static [&'static str];
    /// Them as `vprintf` expects them.
    type Passed: Copy;
    fn passed(self) -> Self::Passed;
    /// Their values in words.
    #[cfg(not(target_arch = "nvptx64"))]
    fn words(&self) -> Vec<String>;
}

macro_rules! arguments {
    ($($name:ident($($type:ident: $field:tt),*);)*) => {$(
        #[doc(hidden)]
        #[derive(Clone, Copy)]
        #[repr(C)]
        #[allow(dead_code, reason = "vprintf reads the fields")]
        pub struct $name<$($type),*>($($type),*);

        impl<$($type: Print),*> Arguments for ($($type,)*)
        where
            $($type: core::fmt::Display,)*
        {
            const CONVERSIONS: &'static [&'static str] = &[$($type::CONVERSION),*];
            type Passed = $name<$($type::Passed),*>;
            #[inline(always)]
            fn passed(self) -> Self::Passed {
                $name($(self.$field.passed()),*)
            }
            #[cfg(not(target_arch = "nvptx64"))]
            fn words(&self) -> Vec<String> {
                vec![$(self.$field.to_string()),*]
            }
        }
    )*};
}

arguments! {
    Passed0();
    Passed1(A: 0);
    Passed2(A: 0, B: 1);
    Passed3(A: 0, B: 1, C: 2);
    Passed4(A: 0, B: 1, C: 2, D: 3);
    Passed5(A: 0, B: 1, C: 2, D: 3, E: 4);
    Passed6(A: 0, B: 1, C: 2, D: 3, E: 4, F: 5);
    Passed7(A: 0, B: 1, C: 2, D: 3, E: 4, F: 5, G: 6);
    Passed8(A: 0, B: 1, C: 2, D: 3, E: 4, F: 5, G: 6, H: 7);
}

/// Maximum length of the format of a line, in bytes.
const MAX_BYTES: usize = 1024;

/// Returns the format of `printf` for a text with these conversions in place of `{}`, with a newline and a zero.
const fn format(text: &str, conversions: &[&str]) -> [u8; MAX_BYTES] {
    let (text, mut format) = (text.as_bytes(), [0; MAX_BYTES]);
    let (mut i, mut length, mut argument) = (0, 0, 0);
    while i < text.len() {
        if text[i] == b'{' || text[i] == b'}' {
            assert!(i + 1 < text.len(), "gpu_println!: expected {{}} or a doubled brace");
            if text[i + 1] == text[i] {
                format[length] = text[i];
                length += 1;
            } else {
                assert!(text[i] == b'{' && text[i + 1] == b'}', "gpu_println!: expected {{}} without a format");
                assert!(argument < conversions.len(), "gpu_println!: expected an argument for each {{}}");
                let conversion = conversions[argument].as_bytes();
                argument += 1;
                let mut k = 0;
                while k < conversion.len() {
                    format[length] = conversion[k];
                    length += 1;
                    k += 1;
                }
            }
            i += 2;
            continue;
        }
        format[length] = text[i];
        length += 1;
        if text[i] == b'%' {
            format[length] = b'%';
            length += 1;
        }
        i += 1;
    }
    assert!(argument == conversions.len(), "gpu_println!: expected {{}} for each argument");
    assert!(length + 2 <= MAX_BYTES, "gpu_println!: expected at most 1022 bytes");
    format[length] = b'\n';
    format
}

/// Prints a line.
#[doc(hidden)]
#[inline(always)]
pub fn line<T: Text, A: Arguments>(arguments: A) {
    let format = const { &format(T::TEXT, A::CONVERSIONS) };
    #[cfg(target_arch = "nvptx64")]
    crate::backend::print(format, arguments.passed());
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let _ = (format, arguments.passed());
        crate::backend::print(T::TEXT, &arguments.words());
    }
}

#[cfg(test)]
mod tests {
    use super::format;

    #[test]
    fn formats_are_those_of_printf() {
        let text = |text, conversions: &[&str]| {
            let format = format(text, conversions);
            let end = format.iter().position(|byte| *byte == 0).unwrap();
            String::from_utf8(format[..end].to_vec()).unwrap()
        };
        assert_eq!(text("{}: {} of 5 %", &["%u", "%.9g"]), "%u: %.9g of 5 %%\n");
        assert_eq!(text("{{{}}}", &["%d"]), "{%d}\n");
        assert!(std::panic::catch_unwind(|| format("{:?}", &["%d"])).is_err());
        assert!(std::panic::catch_unwind(|| format("{}", &["%d", "%d"])).is_err());
    }
}
