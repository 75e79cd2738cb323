//! The daemon's counters, as the REST server asks for them.

use std::sync::Arc;

use vmfork_host::metrics::Metrics;
use vmfork_rest::http::Counters;

/// Requests are counted here, and `/metrics` is answered.
#[derive(Debug)]
pub struct Counted(pub Arc<Metrics>);

impl Counters for Counted {
    fn request(&self, method: &str, route: &str, status: u16) {
        self.0.request(method, route, status);
    }

    fn text(&self) -> String {
        self.0.text()
    }
}
