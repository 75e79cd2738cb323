#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmfork_fuzz::nbd_client::run(data));
