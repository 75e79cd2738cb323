#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmfork_fuzz::store_sealed::run(data));
