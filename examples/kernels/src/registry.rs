//! The table of all kernels, which the program, its tests and the README use.

use crate::families;
use crate::session::Session;
use anyhow::{Result, bail};
use cuda_std::emulate::Fault;

/// A version of an operation.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Its number, unique and consecutive.
    pub number: u32,
    /// Its name, unique.
    pub name: &'static str,
    /// The idea that this version adds to the previous one, in one sentence.
    pub idea: &'static str,
    /// Its source file, relative to the root of the repository.
    pub source: &'static str,
    /// The GPUs that can run it.
    pub needs: Needs,
    /// The fault that is planted in it, and that the emulator reports.
    pub fault: Option<Fault>,
    /// Creates the arrays, launches and expected results of a run.
    pub setup: fn(&mut Session) -> Result<()>,
}

/// The architecture that a kernel needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    /// Any GPU from Ampere on.
    Sm80,
    /// Hopper: TMA and wgmma.
    Sm90a,
}

impl Needs {
    /// Returns the name of the architecture.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90a => "sm_90a",
        }
    }
}

impl Kernel {
    /// Returns a kernel of any GPU from Ampere on without a planted fault.
    pub const fn new(
        number: u32,
        name: &'static str,
        source: &'static str,
        idea: &'static str,
        setup: fn(&mut Session) -> Result<()>,
    ) -> Self {
        Self { number, name, idea, source, needs: Needs::Sm80, fault: None, setup }
    }

    /// Returns the kernel with Hopper as its architecture.
    #[must_use]
    pub const fn hopper(mut self) -> Self {
        self.needs = Needs::Sm90a;
        self
    }

    /// Returns the kernel with a planted fault.
    #[must_use]
    pub const fn planted(mut self, fault: Fault) -> Self {
        self.fault = Some(fault);
        self
    }
}

/// The versions of an operation, from naive to fast.
#[derive(Clone, Copy)]
pub struct Family {
    /// Its name, by which all of its kernels can be run.
    pub name: &'static str,
    /// The operation, in one sentence.
    pub problem: &'static str,
    /// The kernels.
    pub kernels: &'static [Kernel],
}

/// All families, in the order in which they are best read.
pub const FAMILIES: [Family; 12] = [
    families::gelu::FAMILY,
    families::adamw::FAMILY,
    families::encoder::FAMILY,
    families::norm::FAMILY,
    families::layernorm::FAMILY,
    families::layernorm_backward::FAMILY,
    families::softmax::FAMILY,
    families::classifier::FAMILY,
    families::gemm::FAMILY,
    families::attention::FAMILY,
    families::attention_backward::FAMILY,
    families::faults::FAMILY,
];

/// Returns all kernels with their families.
pub fn all() -> impl Iterator<Item = (Family, Kernel)> {
    FAMILIES.into_iter().flat_map(|family| family.kernels.iter().map(move |kernel| (family, *kernel)))
}

/// Returns the kernels that a word of the command line names: a number, a name, a family, or `all`, which leaves out those with a
/// planted fault.
pub fn find(word: &str) -> Result<Vec<(Family, Kernel)>> {
    let number = word.parse().ok();
    let is_named = |(family, kernel): &(Family, Kernel)| match word {
        "all" => kernel.fault.is_none(),
        _ => Some(kernel.number) == number || kernel.name == word || family.name == word,
    };
    let found: Vec<_> = all().filter(is_named).collect();
    if found.is_empty() {
        let count = all().count();
        bail!("kernel: expected a number from 1 to {count}, a name, a family or all, found {word}; `list` shows them");
    }
    Ok(found)
}

/// Returns the tables of the README: for each family, the number, name and idea of its kernels.
pub fn markdown() -> String {
    let row = |&Kernel { number, name, idea, source, .. }: &Kernel| {
        let path = source.strip_prefix("examples/kernels/").map_or(format!("../../{source}"), str::to_owned);
        format!("| {number} | [`{name}`]({path}) | {idea} |\n")
    };
    let table = |Family { name, problem, kernels }: Family| {
        let rows: String = kernels.iter().map(row).collect::<Vec<_>>().concat();
        format!("\n### {name}\n\n{problem}\n\n| | kernel | idea |\n|---|---|---|\n{rows}")
    };
    FAMILIES.map(table).concat()
}
