// SPDX-License-Identifier: Apache-2.0

// Package reply is how every Go daemon of the node answers: JSON bodies, one error shape, strict request bodies,
// request ids and one log line per request.
package reply

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"opensandbox.io/node/wire"
)

// Fault is an error that is meant for the caller: a code of spec/errors.yaml, what happened, what to do next.
type Fault struct {
	Code    wire.Code
	Message string
	// Hint replaces the code's own hint where the place that fails knows better.
	Hint string
	// Status replaces the code's own where the published contract has another for one route; 0: it does not.
	Status int
}

func (f *Fault) status() int {
	if f.Status != 0 {
		return f.Status
	}
	return f.Code.Status()
}

func (f *Fault) Error() string { return string(f.Code) + ": " + f.Message }

// WithHint gives the fault a more exact hint and returns it.
func (f *Fault) WithHint(format string, args ...any) *Fault {
	f.Hint = fmt.Sprintf(format, args...)
	return f
}

// Errorf makes a Fault.
func Errorf(code wire.Code, format string, args ...any) *Fault {
	return &Fault{Code: code, Message: fmt.Sprintf(format, args...)}
}

// body is the error shape of the contract; empty fields are left out because published clients cannot parse null.
type body struct {
	Code      wire.Code `json:"code"`
	Message   string    `json:"message"`
	Hint      string    `json:"hint,omitempty"`
	RequestID string    `json:"requestId,omitempty"`
}

// Marshal is json.Marshal without the escapes for HTML: people read what we answer, and no page embeds it.
func Marshal(v any) ([]byte, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(v)
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), err
}

// JSON answers with v as the body.
func JSON(w http.ResponseWriter, status int, v any) {
	data, err := Marshal(v)
	if err != nil {
		// Only a type that cannot be marshalled gets here: a programming error, shown by the Handle middleware as a 500.
		panic(fmt.Errorf("reply: %w", err))
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(data)))
	w.WriteHeader(status)
	_, _ = w.Write(data)
}

// Error answers with err: a *Fault as it is, anything else as the daemon's internal error whose details go to the
// log only.
func Error(w http.ResponseWriter, r *http.Request, err error) {
	f := Explain(r, err)
	w.Header().Set("Cache-Control", "no-store")
	if id := RequestID(r); id != "" {
		w.Header().Set("X-Request-ID", id)
	}
	JSON(w, f.status(), body{Code: f.Code, Message: f.Message, Hint: f.Hint, RequestID: RequestID(r)})
}

// Explain gives what Error would say, complete, to those who say it in another form than JSON. What is our fault is
// noted for the log.
func Explain(r *http.Request, err error) Fault {
	var f *Fault
	state := stateOf(r)
	if !errors.As(err, &f) {
		if state != nil {
			state.cause = err
		}
		f = &Fault{Code: internalCode(state), Message: "Something went wrong inside; the log has the details under the request id."}
	} else if state != nil && ourFault(f.status()) {
		state.cause = err
	}
	told := *f
	if told.Hint == "" {
		told.Hint = f.Code.Hint()
	}
	if told.Message == "" {
		told.Message = string(f.Code) // clients require a message
	}
	return told
}

// ourFault tells failures of this daemon from what it only reports: a wish it cannot fulfil, a program in a sandbox
// that does not answer.
func ourFault(status int) bool {
	return status == http.StatusInternalServerError || status == http.StatusServiceUnavailable
}

func internalCode(s *state) wire.Code {
	if s != nil && s.internal != "" {
		return s.internal
	}
	return wire.CodeUnknown
}
