// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"strings"
)

// traceParent is the W3C trace context of a request: the caller's if it is well formed, a fresh one otherwise. What
// is not well formed is not repaired: it came from somebody who does not speak the protocol.
func traceParent(header http.Header) string {
	if given := header.Values("Traceparent"); len(given) == 1 && validTraceParent(given[0]) {
		return given[0]
	}
	var ids [24]byte
	_, _ = rand.Read(ids[:]) // never fails (crypto/rand)
	// Flags 00: nobody has asked for a record of it.
	return "00-" + hex.EncodeToString(ids[:16]) + "-" + hex.EncodeToString(ids[16:]) + "-00"
}

// validTraceParent checks version-traceid-parentid-flags. A later version may have more fields behind these; then
// nothing but their place is known, and they are bounded like the rest.
func validTraceParent(s string) bool {
	const length = 2 + 1 + 32 + 1 + 16 + 1 + 2
	if len(s) < length || len(s) > 128 || s[2] != '-' || s[35] != '-' || s[52] != '-' {
		return false
	}
	version, trace, parent, flags := s[:2], s[3:35], s[36:52], s[53:55]
	if !isHex(version) || !isHex(trace) || !isHex(parent) || !isHex(flags) || version == "ff" {
		return false
	}
	if strings.Trim(trace, "0") == "" || strings.Trim(parent, "0") == "" {
		return false
	}
	if len(s) == length {
		return true
	}
	if version == "00" || s[length] != '-' {
		return false
	}
	return strings.IndexFunc(s[length:], func(r rune) bool { return r <= ' ' || r > '~' }) < 0
}

func isHex(s string) bool {
	for i := range len(s) {
		if (s[i] < '0' || s[i] > '9') && (s[i] < 'a' || s[i] > 'f') {
			return false
		}
	}
	return true
}

// TraceParent gives the request's trace context, to be passed on. Empty outside of Handle.
func TraceParent(r *http.Request) string {
	if s := stateOf(r); s != nil {
		return s.trace
	}
	return ""
}

// TraceID is the part of TraceParent that all hops share; log lines and records carry it.
func TraceID(r *http.Request) string {
	if trace := TraceParent(r); trace != "" {
		return trace[3:35]
	}
	return ""
}
