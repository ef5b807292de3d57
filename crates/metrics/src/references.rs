//! Published results of GPT-2 and GPT-3, for reference lines.
//!
//! The losses of GPT-2 were computed by llm.c on its FineWeb validation shard, and its HellaSwag accuracies with the
//! length-normalized loss. Both are in llm.c's `dev/vislog.ipynb`. The accuracies of GPT-3 are zero-shot results from
//! its paper (Brown et al. 2020, appendix H, HellaSwag).

/// A published model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reference {
    /// Name on the command line.
    pub id: &'static str,
    /// Name in a figure.
    pub name: &'static str,
    /// Loss on llm.c's FineWeb validation shard.
    pub loss: Option<f64>,
    /// HellaSwag accuracy as a fraction.
    pub hellaswag: f64,
}

/// All published models, smallest first.
pub const REFERENCES: [Reference; 8] = [
    Reference { id: "gpt2-124m", name: "GPT-2 124M", loss: Some(3.424958), hellaswag: 0.294463 },
    Reference { id: "gpt2-350m", name: "GPT-2 350M", loss: Some(3.083089), hellaswag: 0.375224 },
    Reference { id: "gpt2-774m", name: "GPT-2 774M", loss: Some(3.000580), hellaswag: 0.431986 },
    Reference { id: "gpt2-1558m", name: "GPT-2 1558M", loss: Some(2.831273), hellaswag: 0.488946 },
    Reference { id: "gpt3-125m", name: "GPT-3 125M", loss: None, hellaswag: 0.337 },
    Reference { id: "gpt3-350m", name: "GPT-3 350M", loss: None, hellaswag: 0.436 },
    Reference { id: "gpt3-760m", name: "GPT-3 760M", loss: None, hellaswag: 0.510 },
    Reference { id: "gpt3-1.3b", name: "GPT-3 1.3B", loss: None, hellaswag: 0.547 },
];

/// Returns the model of a name on the command line.
pub fn find(id: &str) -> Option<Reference> {
    REFERENCES.into_iter().find(|reference| reference.id == id)
}
