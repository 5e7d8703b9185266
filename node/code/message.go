// SPDX-License-Identifier: Apache-2.0

package code

import (
	"bytes"
	"encoding/json"
	"errors"
	"unicode/utf8"
)

const (
	formsMax     = 32 // of a value
	formNameMax  = 256
	tracebackMax = 1000 // lines; the kernel cuts its own
	// eventCost is what an event takes besides its line, at most.
	eventCost = 4 << 10
)

// message is a line of a kernel.
type message struct {
	Type      string
	Count     int
	Data      []form
	Ename     string
	Evalue    string
	Traceback []string

	held    int64 // of the budget
	dropped bool  // it was too large, and is not there
}

// form is one of the forms in which a value is shown.
type form struct {
	mime    string
	content json.RawMessage // a part of the line
}

// waits tells whether the message, or what is made of it, is kept after it was heeded.
func (m *message) waits() bool { return m.Type == "result" || m.Type == "display" || m.Type == "error" }

// errNoMessage is the answer to a line that says nothing; errTooMany to one with more parts than anybody needs.
var (
	errNoMessage = errors.New("not a message")
	errTooMany   = errors.New("too many parts")
)

// parse reads a line. A general decoder makes of some MB of "[],[],[]" hundreds: so this one counts before it keeps, and
// what it keeps is never larger than the line.
func parse(line []byte) (m message, err error) {
	line = bytes.TrimSpace(line)
	// Of text that is not UTF-8 the decoder would make three bytes of one.
	if len(line) == 0 || line[0] != '{' || !utf8.Valid(line) || !json.Valid(line) {
		return m, errNoMessage
	}
	err = each(line, func(key, value []byte) error {
		name, err := text(key)
		if err != nil {
			return err
		}
		switch name {
		case "type":
			m.Type, err = text(value)
		case "ename":
			m.Ename, err = text(value)
		case "evalue":
			m.Evalue, err = text(value)
		case "count":
			err = json.Unmarshal(value, &m.Count)
		case "data":
			m.Data, err = forms(value)
		case "traceback":
			m.Traceback, err = texts(value)
		}
		return err
	})
	return m, err
}

func forms(value []byte) (list []form, err error) {
	if value[0] != '{' {
		return nil, nil
	}
	err = each(value, func(key, content []byte) error {
		if len(list) == formsMax || len(key) > formNameMax {
			return errTooMany
		}
		name, err := text(key)
		list = append(list, form{name, content})
		return err
	})
	return list, err
}

func texts(value []byte) (list []string, err error) {
	if value[0] != '[' {
		return nil, nil
	}
	err = each(value, func(_, item []byte) error {
		if len(list) == tracebackMax {
			return errTooMany
		}
		line, err := text(item)
		list = append(list, line)
		return err
	})
	return list, err
}

func text(value []byte) (string, error) {
	if value[0] != '"' {
		return "", errNoMessage
	}
	var s string
	err := json.Unmarshal(value, &s)
	return s, err
}

// each calls visit for what is in an object or array that is known to be valid; of an array there is no key.
func each(value []byte, visit func(key, item []byte) error) error {
	object := value[0] == '{'
	rest := bytes.TrimLeft(value[1:], space)
	for rest[0] != '}' && rest[0] != ']' {
		var key, item []byte
		if object {
			key, rest = first(rest)
			rest = bytes.TrimLeft(rest, space+":")
		}
		item, rest = first(rest)
		if err := visit(key, item); err != nil {
			return err
		}
		rest = bytes.TrimLeft(rest, space+",")
	}
	return nil
}

const space = " \t\r\n"

// first divides valid text behind its first value.
func first(rest []byte) (value, behind []byte) {
	depth := 0
	for i := 0; i < len(rest); i++ {
		switch rest[i] {
		case '"':
			for i++; rest[i] != '"'; i++ {
				if rest[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
			continue
		case '}', ']':
			depth--
		default:
			// A number or a word ends before what cannot be a part of it.
			if depth > 0 || i+1 < len(rest) && bytes.IndexByte([]byte(space+",:}]"), rest[i+1]) < 0 {
				continue
			}
		}
		if depth == 0 {
			return rest[:i+1], rest[i+1:]
		}
	}
	return rest, nil
}
