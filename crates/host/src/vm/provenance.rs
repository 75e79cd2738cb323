//! What a VM came of, as far as it goes on to its clones.
//!
//! A VM does not know where its missing memory comes from.
//! The code that starts it (a store of snapshots, another host) records that in a type of its own,
//! which is held here.
//! Promise: what a VM came of lives as long as it, as all that is frozen of it, and as its clones.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use vmfork_engine::Engine;

/// Something that VMs come of. A VM has at most one of each kind.
pub trait CameOf: Any + fmt::Debug + Send + Sync {
    /// A VM that came of it goes on as a view of this engine's image.
    fn goes_on(&self, _engine: &Arc<Engine>) {}
}

/// All that a VM came of. Its clones get the same.
#[derive(Debug, Clone, Default)]
pub struct Provenance(Vec<Arc<dyn CameOf>>);

impl Provenance {
    /// With this, in place of the one of its kind.
    pub fn with<T: CameOf>(mut self, it: Arc<T>) -> Self {
        self.set(it);
        self
    }

    /// This takes the place of the one of its kind.
    pub fn set<T: CameOf>(&mut self, it: Arc<T>) {
        self.0.retain(|other| !is::<T>(other));
        self.0.push(it);
    }

    /// The one of a kind.
    pub fn get<T: CameOf>(&self) -> Option<Arc<T>> {
        let it: Arc<dyn Any + Send + Sync> = Arc::clone(self.0.iter().find(|it| is::<T>(it))?) as _;
        it.downcast().ok()
    }

    /// The VM goes on as a view of this engine's image.
    pub fn goes_on(&self, engine: &Arc<Engine>) {
        self.0.iter().for_each(|it| it.goes_on(engine));
    }
}

fn is<T: CameOf>(it: &Arc<dyn CameOf>) -> bool {
    let it: &dyn Any = &**it;
    it.is::<T>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Store(u32);
    impl CameOf for Store {}

    #[derive(Debug)]
    struct Host;
    impl CameOf for Host {}

    #[test]
    fn there_is_one_of_each_kind_the_last() {
        let came_of = Provenance::default().with(Arc::new(Store(1))).with(Arc::new(Host));
        let clones = came_of.clone().with(Arc::new(Store(2)));
        assert_eq!(came_of.get::<Store>().expect("the first").0, 1);
        assert_eq!(clones.get::<Store>().expect("the last").0, 2);
        assert_eq!(clones.0.len(), 2);
        assert!(clones.get::<Host>().is_some() && Provenance::default().get::<Host>().is_none());
    }
}
