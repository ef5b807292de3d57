//! The program's commands, one file each.

pub mod selftest;
