//! What other hosts are given of stored images.
//!
//! | route | does |
//! |---|---|
//! | `POST /cluster/v1/stored-images` | [`Wanted`] → [`Told`], or null: what this host has of it |
//! | `GET /cluster/v1/stored-images/ID/here/KEY` | a file that is here |
//! | `GET /cluster/v1/stored-images/ID/brought/KEY` | the same; a chunk that is not is brought |

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use tokio::task::block_in_place;
use vmfork_rest::http::ApiError;
use vmfork_store::{BlobError, KeyOf, SnapshotId};

use crate::context::Context;
use crate::error::{ClusterError, StoredError};
use crate::server::Caller;
use crate::stored::{STORED, Served, Told, Wanted};
use crate::this_host::ThisHost;

const GIVE: &str = "give a stored image";

/// Its parts of the state.
#[derive(Clone)]
struct Of {
    this: Arc<ThisHost>,
    context: Context,
}

/// For members.
pub(crate) fn of(this: &Arc<ThisHost>, context: Context) -> Router {
    Router::new()
        .route(STORED, post(tell))
        .route(&format!("{STORED}/{{id}}/{}/{{*key}}", Served::IfHere.word()), get(give))
        .route(&format!("{STORED}/{{id}}/{}/{{*key}}", Served::OrBrought.word()), get(bring))
        .with_state(Of { this: Arc::clone(this), context })
}

async fn tell(
    State(of): State<Of>,
    Extension(Caller(from)): Extension<Caller>,
    Json(wanted): Json<Wanted>,
) -> Result<Json<Option<Told>>, ApiError> {
    if let Wanted::Id(id) = wanted {
        of.this.stored.heard(id, from);
    }
    let stored = &of.this.stored;
    let told = stored.here().and_then(|here| block_in_place(|| here.find(&wanted)));
    // One that is being pulled is not in the store from the first moment.
    let comes = || match wanted {
        Wanted::Id(id) if stored.pulls(id) => {
            Some(Told { name: String::new(), id, is_whole: false, runs: 0 })
        }
        _ => None,
    };
    Ok(Json(told.or_else(comes)))
}

async fn give(
    State(of): State<Of>,
    Path((id, key)): Path<(SnapshotId, String)>,
) -> Result<Bytes, ApiError> {
    let given = of.give(id, &key).map_err(|error| error.to_body(GIVE))?;
    Ok(given.ok_or_else(|| StoredError::NoFile.to_body(GIVE))?)
}

async fn bring(
    State(of): State<Of>,
    Path((id, key)): Path<(SnapshotId, String)>,
) -> Result<Bytes, ApiError> {
    let brought = of.bring(id, &key).await.map_err(|error| error.to_body(GIVE))?;
    Ok(brought.ok_or_else(|| StoredError::NoFile.to_body(GIVE))?)
}

impl Of {
    /// What is here. A stored name may have come to mean another image than was asked for.
    fn give(&self, id: SnapshotId, key: &str) -> Result<Option<Bytes>, StoredError> {
        let here = self.this.stored.here().ok_or(ClusterError::Leaving)?;
        if let Some(KeyOf::Snapshot(name)) = KeyOf::parse(key) {
            let told = block_in_place(|| here.find(&Wanted::Id(id)));
            if told.is_none_or(|told| told.name != name) {
                return Ok(None);
            }
        }
        match block_in_place(|| here.give(key)) {
            Ok(file) => {
                if matches!(KeyOf::parse(key), Some(KeyOf::Chunk(_))) {
                    self.this.stored.given(false);
                }
                Ok(Some(file.into()))
            }
            Err(BlobError::NotFound { .. } | BlobError::BadKey { .. }) => Ok(None),
            Err(error) => Err(StoredError::Blob(error)),
        }
    }

    /// The same, or a chunk of an image that this host pulls itself.
    async fn bring(&self, id: SnapshotId, key: &str) -> Result<Option<Bytes>, StoredError> {
        if let Some(file) = self.give(id, key)? {
            return Ok(Some(file));
        }
        let Some(KeyOf::Chunk(hash)) = KeyOf::parse(key) else { return Ok(None) };
        let stored = &self.this.stored;
        let here = stored.here().ok_or(ClusterError::Leaving)?;
        // What it has none of, it would keep for nothing.
        let has_part = || {
            let told = block_in_place(|| here.find(&Wanted::Id(id)));
            told.is_some_and(|told| !told.is_whole)
        };
        if !stored.pulls(id) && !has_part() {
            return Ok(None);
        }
        let swarm = stored.swarm(id).ok_or(ClusterError::Leaving)?;
        let (member, _) = self.context.parts()?;
        let chunk = swarm.chunk(&member.hosts, key, hash, true).await;
        let chunk = chunk.map_err(StoredError::Missing)?;
        stored.given(true);
        Ok(Some(chunk))
    }
}
