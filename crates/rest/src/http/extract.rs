//! Extractors that answer with an `ErrorBody` where axum's own answer with text.

use std::convert::Infallible;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use vmfork_api::LabelFilter;

use super::check;
use super::document::Document;
use super::error::{ApiError, bad_request};
use super::listen::Socket;
use vmfork_control::User;

/// A JSON body. An empty one is an error.
#[derive(Debug)]
pub(super) struct Body<T>(pub(super) T);

/// A JSON body that may be left out: then it is the default.
#[derive(Debug)]
pub(super) struct OptionalBody<T>(pub(super) T);

/// Who asks, as far as the connection tells.
#[derive(Debug)]
pub(super) struct By(pub(super) User);

impl<S: Send + Sync> FromRequestParts<S> for By {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        // Other hosts' daemons run as root.
        Ok(Self(parts.extensions.get().copied().unwrap_or(User::Uid(0))))
    }
}

/// The socket, if the request came over TCP.
#[derive(Debug)]
pub(super) struct OverTcp(pub(super) Option<Socket>);

impl<S: Send + Sync> FromRequestParts<S> for OverTcp {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get().cloned()))
    }
}

/// The query string. Unknown parameters are errors where `T` denies them.
#[derive(Debug)]
pub(super) struct Params<T>(pub(super) T);

/// `{vm}` of the path: a name or an id.
#[derive(Debug)]
pub(super) struct VmRef(pub(super) String);

/// `{name}` of the path: an image's.
#[derive(Debug)]
pub(super) struct ImageName(pub(super) String);

/// `{name}` of the path: a snapshot's.
#[derive(Debug)]
pub(super) struct SnapshotName(pub(super) String);

/// `{id}` of the path: a disk's.
#[derive(Debug)]
pub(super) struct DiskRef(pub(super) String);

/// `{name}` of the path: a volume's.
#[derive(Debug)]
pub(super) struct VolumeName(pub(super) String);

async fn bytes<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, ApiError> {
    Bytes::from_request(request, state).await.map_err(|rejection| {
        let status = rejection.status();
        let error = bad_request("read the request's body").cause(rejection.body_text());
        match (status, &rejection) {
            (StatusCode::PAYLOAD_TOO_LARGE, _) => ApiError::with_status(
                status,
                error.remedy("send less: big inputs go by `PUT …/files` or the exec stream"),
            ),
            (_, BytesRejection::FailedToBufferBody(_) | _) => error.into(),
        }
    })
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    if bytes.is_empty() {
        return Err(bad_request("the request has no body")
            .remedy("send a JSON object; its fields are in /v1/openapi.json")
            .into());
    }
    // serde takes an array for an object, its fields in their order.
    if bytes.trim_ascii_start().starts_with(b"[") {
        return Err(bad_request("the request's body is not what this route takes")
            .cause("invalid type: array, expected an object")
            .remedy("send a JSON object; its fields are in /v1/openapi.json")
            .into());
    }
    serde_json::from_slice(bytes)
        .or_else(|error| with_whole_numbers(bytes).map_err(|_| error))
        .map_err(|error| {
            bad_request("the request's body is not what this route takes")
                .cause(error)
                .remedy("the fields of each request are in /v1/openapi.json")
                .into()
        })
}

/// Parses a document whose writer has one kind of number: to JSON Schema, `3.0` is an integer.
fn with_whole_numbers<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    let Document(mut document) = serde_json::from_slice(bytes)?;
    make_whole(&mut document);
    serde_json::from_value(document)
}

fn make_whole(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            // Every whole number below 2^53 prints as its digits.
            let text = number.as_f64().map(|number| format!("{number:.0}"));
            let whole = text.and_then(|text| text.parse::<i64>().ok());
            if let Some(whole) = whole.filter(|whole| {
                whole.unsigned_abs() < 1 << 53 && Some(*whole as f64) == number.as_f64()
            }) {
                *value = whole.into();
            }
        }
        Value::Array(values) => values.iter_mut().for_each(make_whole),
        Value::Object(fields) => fields.values_mut().for_each(make_whole),
        _ => {}
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        parse(&bytes(request, state).await?).map(Self)
    }
}

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for OptionalBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let bytes = bytes(request, state).await?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        // `null` is no request either.
        Ok(Self(parse::<Option<T>>(&bytes)?.unwrap_or_default()))
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let Query(params) = Query::try_from_uri(&parts.uri).map_err(bad_query)?;
        Ok(Self(params))
    }
}

fn bad_query(error: impl std::fmt::Display) -> ApiError {
    bad_request("the parameters after `?` are not what this route takes")
        .cause(error)
        .remedy("the parameters of each route are in /v1/openapi.json")
        .into()
}

/// The query string of a list that labels filter: `?label=KEY=VALUE`, repeated, and the other
/// parameters.
#[derive(Debug)]
pub(super) struct Filtered<T>(pub(super) Vec<LabelFilter>, pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Filtered<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let mut filters = Vec::new();
        let mut rest = form_urlencoded::Serializer::new(String::from("/?"));
        for (key, value) in form_urlencoded::parse(parts.uri.query().unwrap_or("").as_bytes()) {
            if key != "label" {
                rest.append_pair(&key, &value);
                continue;
            }
            filters.push(value.parse().map_err(|error| {
                bad_request("the parameter `label` filters by `KEY` or `KEY=VALUE`").cause(error)
            })?);
        }
        let rest: Uri = rest.finish().parse().map_err(bad_query)?;
        let Query(rest) = Query::try_from_uri(&rest).map_err(bad_query)?;
        Ok(Self(filters, rest))
    }
}

async fn path_part<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, ApiError> {
    match Path::<String>::from_request_parts(parts, state).await {
        Ok(Path(part)) => Ok(part),
        Err(rejection) => {
            Err(bad_request("the path is not well formed").cause(rejection.body_text()).into())
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for VmRef {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let vm = path_part(parts, state).await?;
        check::name("VM", &vm)?;
        Ok(Self(vm))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for ImageName {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = path_part(parts, state).await?;
        check::name("image", &name)?;
        Ok(Self(name))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for SnapshotName {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = path_part(parts, state).await?;
        check::name("snapshot", &name)?;
        Ok(Self(name))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for DiskRef {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let id = path_part(parts, state).await?;
        check::disk_id(&id)?;
        Ok(Self(id))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for VolumeName {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = path_part(parts, state).await?;
        check::name("volume", &name)?;
        Ok(Self(name))
    }
}

/// `?follow`, `?follow=true` and `?follow=1` are all yes.
pub(super) fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "" | "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        other => Err(serde::de::Error::custom(format!("`{other}` is neither true nor false"))),
    }
}

#[cfg(test)]
mod tests {
    use vmfork_api::KillRequest;

    use super::*;

    #[test]
    fn an_array_is_no_object() {
        assert!(parse::<KillRequest>(b"{}").is_ok());
        assert!(
            parse::<KillRequest>(b" []").is_err() && parse::<KillRequest>(b"[1, true]").is_err()
        );
    }

    #[test]
    fn a_field_that_is_given_twice_is_refused() {
        for bad in [r#"{"grace_ms": 1, "grace_ms": 2}"#, r#"{"grace_ms": 1.0, "grace_ms": 2}"#] {
            assert!(parse::<KillRequest>(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_whole_number_may_be_written_with_a_fraction() {
        let grace_ms = |text: &str| {
            let request = parse::<KillRequest>(text.as_bytes());
            request.map(|request| request.grace_ms).ok()
        };
        assert_eq!(grace_ms(r#"{"grace_ms": 3.0}"#), Some(3));
        assert_eq!(grace_ms(r#"{"grace_ms": 4e3}"#), Some(4000));
        for bad in ["3.5", "-1.0", "1e300", r#""3""#, "18446744073709551616"] {
            assert_eq!(grace_ms(&format!(r#"{{"grace_ms": {bad}}}"#)), None, "{bad}");
        }
    }
}
