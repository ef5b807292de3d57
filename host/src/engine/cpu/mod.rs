//! The CPU engine.
