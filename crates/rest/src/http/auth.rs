use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HeaderValue, WWW_AUTHENTICATE};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;
use vmfork_api::{ErrorBody, ErrorCode};

use super::error::ApiError;

/// A guess must be hopeless: 16 characters of base64 are 96 bits.
const TOKEN_BYTES_MIN: usize = 16;
const TOKEN_BYTES_MAX: usize = 4096;

/// What a client has to show on TCP.
pub struct Token(Vec<u8>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("read the token from {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the token in {path} can be read by everybody (mode {mode:04o}); make it 0600")]
    Public { path: PathBuf, mode: u32 },
    #[error(
        "the token in {path} is no token: it must be one line of {TOKEN_BYTES_MIN} to \
         {TOKEN_BYTES_MAX} printable ASCII characters without blanks"
    )]
    Malformed { path: PathBuf },
}

impl Token {
    /// The token that the file at `path` holds, white space around it left out.
    ///
    /// # Errors
    /// If the file can't be read, is open to everybody, or holds no token.
    pub fn from_file(path: &Path) -> Result<Self, TokenError> {
        let failed = |source| TokenError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.mode() & 0o7777;
        if mode & 0o007 != 0 {
            return Err(TokenError::Public { path: path.to_owned(), mode });
        }
        let mut bytes = Vec::new();
        let limit = u64::try_from(TOKEN_BYTES_MAX).unwrap_or(u64::MAX) + 2;
        file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
        let token = bytes.trim_ascii();
        let fits = (TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len());
        if !fits || !token.iter().all(u8::is_ascii_graphic) {
            return Err(TokenError::Malformed { path: path.to_owned() });
        }
        Ok(Self(token.to_vec()))
    }

    /// Takes equally long for all values of the same length.
    fn matches(&self, header: &HeaderValue) -> bool {
        let value = header.as_bytes();
        let Some((scheme, shown)) = value.split_at_checked("Bearer ".len()) else { return false };
        scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(self.0.ct_eq(shown))
    }
}

/// Refuses every request without the token.
pub(super) async fn require(
    State(token): State<Arc<Token>>,
    request: Request,
    next: Next,
) -> Response {
    let shown = request.headers().get(AUTHORIZATION);
    if shown.is_some_and(|header| token.matches(header)) {
        return next.run(request).await;
    }
    let message =
        if shown.is_some() { "the token is wrong" } else { "this port wants a token, none came" };
    let error = ErrorBody::new(ErrorCode::Unauthorized, message)
        .remedy("send `Authorization: Bearer TOKEN` with the token of vmforkd's --token-file");
    let mut response = ApiError::from(error).into_response();
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn token_of(text: &str, mode: u32) -> Result<Token, TokenError> {
        let file = tempfile::NamedTempFile::new().expect("temp file");
        std::fs::write(file.path(), text).expect("write");
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(file.path(), permissions).expect("chmod");
        Token::from_file(file.path())
    }

    #[test]
    fn only_the_whole_token_matches() {
        let token = token_of("  0123456789abcdef\n", 0o600).expect("a token");
        let matches = |header| token.matches(&HeaderValue::from_static(header));
        assert!(matches("Bearer 0123456789abcdef"));
        assert!(matches("bearer 0123456789abcdef"));
        for bad in [
            "",
            "Bearer ",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdefg",
            "0123456789abcdef",
            "Basic 0123456789abcdef",
        ] {
            assert!(!matches(bad), "{bad}");
        }
    }

    #[test]
    fn files_that_hold_no_secret_are_refused() {
        assert!(matches!(token_of("short", 0o600), Err(TokenError::Malformed { .. })));
        assert!(matches!(token_of("two words and more", 0o600), Err(TokenError::Malformed { .. })));
        assert!(matches!(
            token_of("0123456789abcdef", 0o644),
            Err(TokenError::Public { mode: 0o644, .. })
        ));
        assert!(matches!(token_of(&"x".repeat(5000), 0o600), Err(TokenError::Malformed { .. })));
    }
}
