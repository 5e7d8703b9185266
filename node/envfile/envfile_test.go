// SPDX-License-Identifier: Apache-2.0

package envfile

import (
	"fmt"
	"strings"
	"testing"
)

func lookup(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

func TestParse(t *testing.T) {
	env := lookup(map[string]string{"HOME": "/root", "X": "x"})
	for text, want := range map[string]string{
		"A=1":                          "[[A 1]] []",
		"A=1\nB=2\n":                   "[[A 1] [B 2]] []",
		"\n  # comment\n\nA=1":         "[[A 1]] []",
		"export A=1":                   "[[A 1]] []",
		"A='it $HOME \\n'":             `[[A it $HOME \n]] []`,
		`A="$HOME ${X}y \$X \"q\" \\"`: `[[A /root xy $X "q" \]] []`,
		`A="a\nb\tc\rd"`:               "[[A a\nb\tc\rd]] []",
		"A='two\nlines'\nB=1":          "[[A two\nlines] [B 1]] []",
		"A=a b # c\nB=x#y":             "[[A a b] [B x#y]] []",
		"A=$X$NOPE.":                   "[[A x.]] []",
		"A=1\nB=$A$A":                  "[[A 1] [B 11]] []",
		"A=\r\nB=1\r\n":                "[[A ] [B 1]] []",
		"A= # nothing":                 "[[A ]] []",
		"nonsense\nA=1":                "[[A 1]] [line 1: no = in it]",
		"1A=1\nB=1":                    `[[B 1]] [line 1: "1A" is not a variable name]`,
		"A='open\nB=1":                 "[[B 1]] [line 1: the quote is not closed]",
		`A="open`:                      "[] [line 1: the quote is not closed]",
		"A='x'y\nB=1":                  "[[B 1]] [line 1: text after the closing quote]",
		"A='x' # fine\nB=1":            "[[A x] [B 1]] []",
		"A='a\nb'\nbad":                "[[A a\nb]] [line 3: no = in it]",
		"A=a\x00b":                     "[] [line 1: a value cannot hold a NUL byte]",
	} {
		pairs, bad := Parse(text, env)
		if got := fmt.Sprint(pairs, " ", bad); got != want {
			t.Errorf("%q:\n got %s\nwant %s", text, got, want)
		}
	}
}

// What published clients append must come back as it was: see escapes in their set_env.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"A=1", "A='x", `A="\`, "A=${", "=\n=", "export =", "A=$\x00"} {
		f.Add(seed, "value 'with' \"all\"\n$kinds\\")
	}
	f.Fuzz(func(t *testing.T, text, value string) {
		env := lookup(map[string]string{"HOME": "/root"})
		pairs, _ := Parse(text, env)
		for _, p := range pairs {
			if !validName(p[0]) || strings.IndexByte(p[1], 0) >= 0 {
				t.Errorf("%q gave %q", text, p)
			}
		}
		if strings.IndexByte(value, 0) >= 0 {
			return
		}
		quoted := "'" + value + "'"
		if strings.Contains(value, "'") {
			r := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\r", `\r`, "\t", `\t`, "$", `\$`, "`", "\\`")
			quoted = `"` + r.Replace(value) + `"`
		}
		pairs, bad := Parse("K="+quoted+"\n", env)
		if len(pairs) != 1 || pairs[0][1] != value || len(bad) != 0 {
			t.Errorf("%q came back as %q %q", value, pairs, bad)
		}
	})
}

func TestExpandPath(t *testing.T) {
	env := lookup(map[string]string{"A": "a", "EMPTY": ""})
	for path, want := range map[string]string{
		"/x":          "/x",
		"~":           "/home/u",
		"~/x":         "/home/u/x",
		"~user/x":     "~user/x",
		"/x/~":        "/x/~",
		"$A/${A}b":    "a/ab",
		"/$EMPTY/x":   "//x",
		"/cost$":      "/cost$",
		"/$1/${}/$-x": "/$1/${}/$-x",
	} {
		if got, err := ExpandPath(path, "/home/u", env); err != nil || got != want {
			t.Errorf("%s: %q %v", path, got, err)
		}
	}
	for _, path := range []string{"$NOPE", "/x/${NOPE}"} {
		if _, err := ExpandPath(path, "/h", env); err == nil {
			t.Errorf("%s: no error", path)
		}
	}
	if _, err := ExpandPath("~", "", env); err == nil {
		t.Error("~ without HOME: no error")
	}
}
