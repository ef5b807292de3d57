//! The program's commands, one file each.

pub mod doctor;
pub mod inspect;
pub mod selftest;
