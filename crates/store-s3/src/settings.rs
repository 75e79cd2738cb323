//! Where the object store is and who asks.

use std::fmt;
use std::time::Duration;

use vmfork_store::BlobError;

use crate::location::LocationError;

/// So long without a sign of life, and an attempt has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a store is opened with.
#[derive(Clone)]
pub struct Settings {
    pub access_key_id: String,
    pub secret_access_key: String,
    /// Of temporary credentials.
    pub session_token: Option<String>,
    /// `None`: Amazon's, by the region.
    pub endpoint: Option<String>,
    pub region: String,
    /// Whether the endpoint may be reached without encryption.
    pub allow_http: bool,
    /// How long to wait for a sign of life, at each attempt.
    pub patience: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("access_key_id", &self.access_key_id)
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("allow_http", &self.allow_http)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// From the environment: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`,
    /// `AWS_ENDPOINT_URL`, `AWS_REGION` or `AWS_DEFAULT_REGION`, `AWS_ALLOW_HTTP`.
    ///
    /// # Errors
    /// No credentials, or an endpoint without encryption that isn't allowed.
    pub fn from_env() -> Result<Self, OpenError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    pub(crate) fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self, OpenError> {
        let get = |name| get(name).filter(|value| !value.is_empty());
        let needed = |variable| get(variable).ok_or(OpenError::NoCredentials { variable });
        Ok(Self {
            access_key_id: needed("AWS_ACCESS_KEY_ID")?,
            secret_access_key: needed("AWS_SECRET_ACCESS_KEY")?,
            session_token: get("AWS_SESSION_TOKEN"),
            endpoint: get("AWS_ENDPOINT_URL"),
            region: get("AWS_REGION")
                .or_else(|| get("AWS_DEFAULT_REGION"))
                .unwrap_or_else(|| "us-east-1".into()),
            allow_http: get("AWS_ALLOW_HTTP").is_some_and(|value| value == "true" || value == "1"),
            patience: PATIENCE,
        })
    }

    pub(crate) fn check(&self) -> Result<(), OpenError> {
        match &self.endpoint {
            Some(endpoint) if endpoint.starts_with("http://") && !self.allow_http => {
                Err(OpenError::NotEncrypted { endpoint: endpoint.clone() })
            }
            _ => Ok(()),
        }
    }
}

/// An object store can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error(transparent)]
    Location(#[from] LocationError),
    #[error("no credentials for the object store: {variable} is not set")]
    NoCredentials { variable: &'static str },
    #[error("the object store {endpoint} is not encrypted")]
    NotEncrypted { endpoint: String },
    #[error("`{location}` is a bucket, and no object in it")]
    NoKey { location: String },
    #[error("the object store can't be set up: {why}")]
    Settings { why: String },
    #[error(transparent)]
    Blob(#[from] BlobError),
}

impl OpenError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Location(error) => Some(error.remedy()),
            Self::NoCredentials { .. } => Some(
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where vmforkd is started".into(),
            ),
            Self::NotEncrypted { .. } => {
                Some("use https://, or set AWS_ALLOW_HTTP=true in a network that you trust".into())
            }
            Self::NoKey { .. } => Some("write s3://BUCKET/KEY".into()),
            Self::Settings { .. } => Some("check AWS_ENDPOINT_URL and AWS_REGION".into()),
            Self::Blob(error) => error.remedy(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Settings, OpenError> {
        Settings::from_variables(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    const KEYS: [(&str, &str); 2] =
        [("AWS_ACCESS_KEY_ID", "me"), ("AWS_SECRET_ACCESS_KEY", "hush")];

    #[test]
    fn credentials_are_needed_and_not_shown() {
        let error = of(&KEYS[..1]).expect_err("no secret");
        assert!(error.to_string().ends_with("AWS_SECRET_ACCESS_KEY is not set"), "{error}");
        let error = of(&[("AWS_ACCESS_KEY_ID", ""), KEYS[1]]).expect_err("empty");
        assert!(error.remedy().is_some_and(|text| text.contains("AWS_ACCESS_KEY_ID")));
        let settings = of(&KEYS).expect("both");
        assert!(!format!("{settings:?}").contains("hush"));
        assert_eq!((settings.region.as_str(), settings.endpoint), ("us-east-1", None));
    }

    #[test]
    fn an_endpoint_that_is_not_encrypted_must_be_allowed() {
        let endpoint = ("AWS_ENDPOINT_URL", "http://127.0.0.1:1");
        let refused = of(&[KEYS[0], KEYS[1], endpoint]).and_then(|settings| settings.check());
        assert!(matches!(refused, Err(OpenError::NotEncrypted { .. })));
        let allow = ("AWS_ALLOW_HTTP", "true");
        of(&[KEYS[0], KEYS[1], endpoint, allow]).and_then(|s| s.check()).expect("allowed");
    }
}
