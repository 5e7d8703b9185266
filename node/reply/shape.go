// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"bytes"
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
)

// checkShape compares a valid JSON value with the type it is for, and says what is wrong; "" when nothing is. It sees
// to what encoding/json does not: fields that are required and missing (those of the generated types that are neither
// pointers nor left out when empty), names that differ in case or come twice, null in a list or map. What it passes
// may still fail to decode.
func checkShape(raw []byte, t reflect.Type) string {
	s := shape{d: json.NewDecoder(bytes.NewReader(raw))}
	s.d.UseNumber()
	s.value("", t, true)
	return s.wrong
}

type shape struct {
	d     *json.Decoder
	wrong string // the first thing
}

func (s *shape) fail(format string, args ...any) {
	if s.wrong == "" {
		s.wrong = fmt.Sprintf(format, args...)
	}
}

// token never fails: the value was read once already.
func (s *shape) token() json.Token {
	token, err := s.d.Token()
	if err != nil {
		s.fail("The body could not be read: %v", err)
	}
	return token
}

// skip passes over a value and says whether it was null.
func (s *shape) skip() bool {
	var value json.RawMessage
	if err := s.d.Decode(&value); err != nil {
		s.fail("The body could not be read: %v", err)
	}
	return string(value) == "null"
}

var (
	readsJSON = reflect.TypeFor[json.Unmarshaler]()
	readsText = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// value checks the next value and says whether it is null. Where nullable is false, null is as wrong as any other kind.
func (s *shape) value(at string, t reflect.Type, nullable bool) (null bool) {
	for t.Kind() == reflect.Pointer && !t.Implements(readsJSON) {
		t = t.Elem()
	}
	if p := reflect.PointerTo(t); p.Implements(readsJSON) || p.Implements(readsText) {
		return s.skip()
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map, reflect.Slice:
	case reflect.String:
		return s.text(at, nullable)
	default:
		return s.skip()
	}
	if t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8 {
		return s.skip() // base64
	}
	open := json.Delim('{')
	if t.Kind() == reflect.Slice {
		open = '['
	}
	token := s.token()
	if token == nil && nullable {
		return true
	}
	if token != open {
		s.fail("%s must be %s, not %s.", subject(at), kindName(t.Kind().String()), tokenName(token))
		return false
	}
	switch t.Kind() {
	case reflect.Struct:
		s.fields(at, t)
	case reflect.Map:
		s.entries(at, t.Elem())
	default:
		for i := 0; s.d.More() && s.wrong == ""; i++ {
			s.value(fmt.Sprintf("%s[%d]", at, i), t.Elem(), t.Elem().Kind() == reflect.Pointer)
		}
	}
	if s.wrong == "" {
		s.token() // the closing one
	}
	return false
}

func (s *shape) text(at string, nullable bool) (null bool) {
	token := s.token()
	if _, ok := token.(string); !ok && (token != nil || !nullable) {
		s.fail("%s must be a string, not %s.", subject(at), tokenName(token))
	}
	return token == nil
}

func (s *shape) entries(at string, t reflect.Type) {
	seen := map[string]bool{}
	for s.d.More() && s.wrong == "" {
		key, _ := s.token().(string)
		name := at + "[" + key + "]"
		if seen[key] {
			s.fail("%s is given twice.", subject(name))
			return
		}
		seen[key] = true
		s.value(name, t, t.Kind() == reflect.Pointer || t.Kind() == reflect.Interface)
	}
}

func (s *shape) fields(at string, t reflect.Type) {
	known := map[string]reflect.StructField{}
	var required []string
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous || name == "" && f.IsExported() {
			panic("reply: " + t.String() + " has a field without a name in JSON")
		}
		if name == "-" || !f.IsExported() {
			continue
		}
		known[name] = f
		if options == "" && f.Type.Kind() != reflect.Pointer {
			required = append(required, name)
		}
	}
	seen := map[string]bool{}
	for s.d.More() && s.wrong == "" {
		key, _ := s.token().(string)
		_, twice := seen[key]
		f, ok := known[key]
		name := key
		if at != "" {
			name = at + "." + key
		}
		switch {
		case !ok:
			s.fail("Unknown field %.200q.", name)
			return
		case twice:
			s.fail("%s is given twice.", subject(name))
			return
		}
		// null is what many clients write for a field they leave out.
		seen[key] = !s.value(name, f.Type, true)
	}
	for _, key := range required {
		if !seen[key] {
			if at != "" {
				key = at + "." + key
			}
			s.fail("%s is missing.", subject(key))
			return
		}
	}
}

func subject(at string) string {
	if at == "" {
		return "The body"
	}
	return fmt.Sprintf("Field %.200q", at)
}

func tokenName(token json.Token) string {
	switch token := token.(type) {
	case nil:
		return "null"
	case bool:
		return "bool"
	case string:
		return "string"
	case json.Delim:
		if token == '[' {
			return "array"
		}
		return "object"
	}
	return "number"
}
