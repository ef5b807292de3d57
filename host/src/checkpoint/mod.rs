//! What a run leaves behind and can begin from, in llm.c's formats.

pub mod model;
