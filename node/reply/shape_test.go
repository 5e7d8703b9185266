// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"strings"
	"testing"

	"opensandbox.io/node/wire"
)

// The decoder takes a missing field for an empty one, the last of two, any case, and null for anything.
func TestDecodeSeesWhatIsMissingTwiceOrNull(t *testing.T) {
	replacements := func() any { return &map[string]wire.Replacement{} }
	moves := func() any { return &[]wire.Move{} }
	command := func() any { return &wire.RunCommandRequest{} }
	session := func() any { return &wire.RunInSessionRequest{} }
	for _, c := range []struct {
		into func() any
		body string
		want string // "": it is fine
	}{
		{replacements, `{"/r":{"old":"a","new":""}}`, ""},
		{replacements, `{"/r":{"old":"a"}}`, `Field "[/r].new" is missing.`},
		{replacements, `{"/r":{"old":"a","new":null}}`, `Field "[/r].new" is missing.`},
		{replacements, `{"/r":null}`, `Field "[/r]" must be an object, not null.`},
		{replacements, `{"/r":{"old":"a","new":"b"},"/r":{"old":"a","new":"c"}}`, `Field "[/r]" is given twice.`},
		{moves, `[{"src":"/a","dest":"/b"},{"src":"/a"}]`, `Field "[1].dest" is missing.`},
		{moves, `[null]`, `Field "[0]" must be an object, not null.`},
		{moves, `{}`, `The body must be an array, not object.`},
		{session, `{}`, `Field "command" is missing.`},
		{session, `{"command":"x","cwd":null,"timeout":null}`, ""},
		{session, `{"Command":"x"}`, `Unknown field "Command".`},
		{command, `{"command":"x","command":"y"}`, `Field "command" is given twice.`},
		{command, `{"command":"x","cwd":null,"cwd":"/"}`, `Field "cwd" is given twice.`},
		{command, `{"command":"x","envs":{"A":1}}`, `Field "envs[A]" must be a string, not number.`},
		{command, `{"command":"x","envs":{"A":null}}`, `Field "envs[A]" must be a string, not null.`},
		{command, `{"command":"x","envs":{"A":"1","A":"2"}}`, `Field "envs[A]" is given twice.`},
		{command, `{"command":"x","envs":null,"argv":null}`, ""},
		{command, `{"argv":["a",{"b":[1]}]}`, `Field "argv[1]" must be a string, not object.`},
		{command, `null`, ""},
	} {
		fault := DecodeReader(strings.NewReader(c.body), c.into(), wire.CodeInvalidRequestBody)
		got := ""
		if fault != nil {
			got = fault.Message
		}
		if got != c.want {
			t.Errorf("%s: %q, wanted %q", c.body, got, c.want)
		}
	}
}
