//! The error of a library that does not exist.

#[test]
fn error_names_a_file_that_does_not_exist() {
    let text = nccl_rs::load_from("/absent/libnccl.so.2".as_ref()).unwrap_err().to_string();
    assert!(text.contains("/absent/libnccl.so.2") && text.contains("pip install nvidia-nccl-cu13"), "{text}");
    assert_eq!(nccl_rs::UniqueId::new().unwrap_err().to_string(), text);
}
