//! GPT-2/GPT-3 pretraining.
