mod control;
fn main() {}
