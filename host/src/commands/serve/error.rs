//! Errors of requests, in OpenAI's format.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The reason why a request failed.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The field of the request that is invalid.
    param: Option<&'static str>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A request that has an invalid field, or is invalid as a whole.
    pub fn invalid(param: Option<&'static str>, message: String) -> Self {
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// A prompt that does not fit into the context.
    pub fn context(message: String) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// A body beyond the limit.
    pub fn too_large(limit: usize) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, format!("body: expected at most {limit} bytes; shorten the request"))
    }

    /// A body that did not arrive in time.
    pub fn slow_body(seconds: u64) -> Self {
        let message = format!("body: expected the complete body within {seconds} s, found only a part; send it faster");
        Self::new(StatusCode::REQUEST_TIMEOUT, message)
    }

    /// A body of a type other than JSON.
    pub fn not_json(found: &str) -> Self {
        let found = if found.is_empty() { "none" } else { found };
        let message = format!("Content-Type: expected application/json, found {found}; set this header");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
    }

    /// A request without the server's token.
    pub fn unauthorized(found: &str) -> Self {
        let message = format!(
            "Authorization: expected `Bearer TOKEN`, found {found}; the server printed the token when it started"
        );
        Self { code: Some("invalid_api_key"), ..Self::new(StatusCode::UNAUTHORIZED, message) }
    }

    /// A request that names the server by an unknown host name.
    pub fn forbidden_host(found: &str) -> Self {
        let found = if found.is_empty() { "none" } else { found };
        let message = format!(
            "Host: expected localhost or an IP address, found {found:.100}; a server with --token-file accepts any host name"
        );
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// A path that does not exist.
    pub fn not_found() -> Self {
        let message = "path: expected /, /events, /health, /live, /v1/models, /v1/completions or /v1/chat/completions, found another; check the URL";
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// A model that the server does not have.
    pub fn unknown_model(expected: &str, found: &str) -> Self {
        let message = format!("model: expected {expected}, found {found:.200}; see /v1/models");
        Self { code: Some("model_not_found"), ..Self::new(StatusCode::NOT_FOUND, message) }
    }

    /// A path that does not have the method.
    pub fn method() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method: expected POST for completions and GET for all else, found another; use that method",
        )
    }

    /// A full queue.
    pub fn busy(what: &str) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, format!("{what}; try again later"))
        }
    }

    /// A request that took too long.
    pub fn timed_out(seconds: u64) -> Self {
        let message = format!("the text was not complete within {seconds} s; ask for fewer tokens, or set --timeout");
        Self::new(StatusCode::GATEWAY_TIMEOUT, message)
    }

    /// A request that the server cannot answer because it is stopping.
    pub fn stopping() -> Self {
        Self::unavailable("the server is stopping; try again after it has restarted".to_owned())
    }

    /// A model that cannot be used now.
    pub fn unavailable(message: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// A failure of the server.
    pub fn internal(message: String) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// Returns the name of the invalid field.
    #[cfg(test)]
    pub fn param(&self) -> Option<&'static str> {
        self.param
    }

    /// Returns the body of the response.
    pub fn json(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response =
            (self.status, [(header::CONTENT_TYPE, "application/json")], self.json().to_string()).into_response();
        let headers = response.headers_mut();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
