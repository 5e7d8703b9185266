// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"

	"opensandbox.io/node/wire"
)

// Decode reads the request's JSON body into v. It refuses a body over limit bytes, unknown fields, missing ones that
// the contract requires, one that is given twice, a second value and wrong types, and says which field was meant. The
// fault carries code, because each daemon has its own.
func Decode(w http.ResponseWriter, r *http.Request, v any, limit int64, code wire.Code) error {
	if err := DecodeReader(http.MaxBytesReader(w, r.Body, limit), v, code); err != nil {
		return err
	}
	return nil
}

// DecodeReader is Decode for a body that does not come from a request of its own (a multipart part, a file).
func DecodeReader(body io.Reader, v any, code wire.Code) *Fault {
	var raw json.RawMessage
	d := json.NewDecoder(body)
	if err := d.Decode(&raw); err != nil {
		return Errorf(code, "%s", explain(err))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		if err != nil {
			return Errorf(code, "%s", explain(err))
		}
		return Errorf(code, "The body holds more than one JSON value.")
	}
	// First its shape, about which the decoder is lenient: it takes a missing field for an empty one, the last of two,
	// and null for anything.
	if wrong := checkShape(raw, reflect.TypeOf(v)); wrong != "" {
		return Errorf(code, "%s", wrong)
	}
	d = json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return Errorf(code, "%s", explain(err))
	}
	return nil
}

// explain turns the decoder's error into a sentence about the body.
func explain(err error) string {
	var (
		tooLarge *http.MaxBytesError
		syntax   *json.SyntaxError
		kind     *json.UnmarshalTypeError
	)
	switch {
	case errors.As(err, &tooLarge):
		return fmt.Sprintf("The body is larger than %d bytes.", tooLarge.Limit)
	case errors.As(err, &syntax):
		return fmt.Sprintf("The body is not valid JSON: %s at byte %d.", syntax.Error(), syntax.Offset)
	case errors.As(err, &kind):
		if kind.Field == "" {
			return fmt.Sprintf("The body must be %s, not %s.", kindName(kind.Type.Kind().String()), kind.Value)
		}
		return fmt.Sprintf("Field %q must be %s, not %s.", kind.Field, kindName(kind.Type.Kind().String()), kind.Value)
	case errors.Is(err, io.EOF):
		return "The body is empty; a JSON value is expected."
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "The body ends in the middle of a JSON value."
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return "Unknown field " + name + "."
	}
	return "The body could not be read: " + err.Error()
}

func kindName(kind string) string {
	switch kind {
	case "struct", "map":
		return "an object"
	case "slice", "array":
		return "an array"
	case "string":
		return "a string"
	case "bool":
		return "true or false"
	case "float64", "float32":
		return "a number"
	}
	return "an integer in range"
}
