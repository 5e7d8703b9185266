// SPDX-License-Identifier: Apache-2.0

// Package envfile reads the file named by EXECD_ENVS (KEY=VALUE lines that commands append to) and expands ~ and
// $VAR in paths.
package envfile

import (
	"fmt"
	"strings"
)

// Parse reads KEY=VALUE lines and gives them in order. lookup resolves $VAR in unquoted and double-quoted values;
// earlier lines come before it, an unknown name is empty, as in a shell.
//
//   - empty lines and lines that start with # are skipped; `export ` in front of a key is allowed
//   - 'value' is literal, "value" knows \\ \" \$ \` \n \r \t and $VAR; both may hold newlines
//   - an unquoted value ends at the end of the line or at white space followed by #
//
// A program in the sandbox writes this file, so a line that makes no sense is left out and named in bad rather
// than failing every command, the one that would repair it among them.
func Parse(text string, lookup func(string) (string, bool)) (pairs [][2]string, bad []string) {
	known := map[string]string{}
	resolve := func(name string) string {
		if v, ok := known[name]; ok {
			return v
		}
		v, _ := lookup(name)
		return v
	}
	line := 0
	for len(text) > 0 {
		line++
		start := text
		text = strings.TrimLeft(text, " \t")
		if text == "" {
			break
		}
		if text[0] == '\n' || text[0] == '\r' || text[0] == '#' {
			_, text, _ = strings.Cut(text, "\n")
			continue
		}
		key, value, rest, err := pair(text, resolve)
		if err != nil {
			bad = append(bad, fmt.Sprintf("line %d: %v", line, err))
			_, text, _ = strings.Cut(text, "\n")
			continue
		}
		known[key] = value
		pairs = append(pairs, [2]string{key, value})
		text = rest
		// Quoted values may span lines; the count is for messages only.
		line += max(0, strings.Count(start[:len(start)-len(text)], "\n")-1)
	}
	return pairs, bad
}

func pair(text string, resolve func(string) string) (key, value, rest string, err error) {
	head, _, _ := strings.Cut(text, "\n")
	eq := strings.IndexByte(head, '=')
	if eq < 0 {
		return "", "", "", fmt.Errorf("no = in it")
	}
	key = strings.TrimSpace(strings.TrimPrefix(head[:eq], "export "))
	if !validName(key) {
		return "", "", "", fmt.Errorf("%q is not a variable name", key)
	}
	text = strings.TrimLeft(text[eq+1:], " \t")
	switch {
	case strings.HasPrefix(text, "'"):
		value, rest, err = single(text[1:])
	case strings.HasPrefix(text, `"`):
		value, rest, err = double(text[1:], resolve)
	default:
		value, rest = bare(text, resolve)
		return key, value, rest, noNUL(value)
	}
	if err == nil {
		err = noNUL(value)
	}
	if err != nil {
		return "", "", "", err
	}
	// Only a comment may follow a closing quote.
	tail, rest, _ := strings.Cut(rest, "\n")
	if tail = strings.TrimSpace(tail); tail != "" && tail[0] != '#' {
		return "", "", "", fmt.Errorf("text after the closing quote")
	}
	return key, value, rest, nil
}

func noNUL(value string) error {
	if strings.IndexByte(value, 0) >= 0 {
		return fmt.Errorf("a value cannot hold a NUL byte")
	}
	return nil
}

func single(text string) (value, rest string, err error) {
	end := strings.IndexByte(text, '\'')
	if end < 0 {
		return "", "", fmt.Errorf("the quote is not closed")
	}
	return text[:end], text[end+1:], nil
}

func double(text string, resolve func(string) string) (value, rest string, err error) {
	var b strings.Builder
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c == '"':
			return b.String(), text[i+1:], nil
		case c == '\\' && i+1 < len(text):
			switch e := text[i+1]; e {
			case 'n':
				b.WriteByte('\n')
			case 'r':
				b.WriteByte('\r')
			case 't':
				b.WriteByte('\t')
			case '\\', '"', '$', '`':
				b.WriteByte(e)
			default:
				b.WriteString(text[i : i+2])
			}
			i += 2
		case c == '$':
			name, width := variable(text[i:])
			if width == 0 {
				b.WriteByte('$')
				i++
				break
			}
			b.WriteString(resolve(name))
			i += width
		default:
			b.WriteByte(c)
			i++
		}
	}
	return "", "", fmt.Errorf("the quote is not closed")
}

func bare(text string, resolve func(string) string) (value, rest string) {
	text, rest, _ = strings.Cut(text, "\n")
	if strings.HasPrefix(text, "#") {
		text = ""
	}
	for _, mark := range []string{" #", "\t#"} {
		text, _, _ = strings.Cut(text, mark)
	}
	text = strings.TrimRight(text, " \t\r")
	var b strings.Builder
	for i := 0; i < len(text); {
		if text[i] == '$' {
			if name, width := variable(text[i:]); width > 0 {
				b.WriteString(resolve(name))
				i += width
				continue
			}
		}
		b.WriteByte(text[i])
		i++
	}
	return b.String(), rest
}

// variable reads $NAME or ${NAME} at the start of text; width 0 when there is none.
func variable(text string) (name string, width int) {
	if strings.HasPrefix(text, "${") {
		end := strings.IndexByte(text, '}')
		if end < 0 || !validName(text[2:end]) {
			return "", 0
		}
		return text[2:end], end + 1
	}
	end := 1
	for end < len(text) && nameByte(text[end], end == 1) {
		end++
	}
	if end == 1 {
		return "", 0
	}
	return text[1:end], end
}

func validName(name string) bool {
	for i := range len(name) {
		if !nameByte(name[i], i == 0) {
			return false
		}
	}
	return name != ""
}

func nameByte(c byte, first bool) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || !first && c >= '0' && c <= '9'
}

// ExpandPath expands a leading ~ to home and $VAR, ${VAR} anywhere. An undefined variable is an error: a path that
// silently lost a part leads somewhere else.
func ExpandPath(path, home string, lookup func(string) (string, bool)) (string, error) {
	if path == "~" || strings.HasPrefix(path, "~/") {
		if home == "" {
			return "", fmt.Errorf("~ cannot be expanded: HOME is not set")
		}
		path = home + path[1:]
	}
	if strings.IndexByte(path, '$') < 0 {
		return path, nil
	}
	var b strings.Builder
	for i := 0; i < len(path); {
		if path[i] == '$' {
			if name, width := variable(path[i:]); width > 0 {
				v, ok := lookup(name)
				if !ok {
					return "", fmt.Errorf("undefined variable %s", name)
				}
				b.WriteString(v)
				i += width
				continue
			}
		}
		b.WriteByte(path[i])
		i++
	}
	return b.String(), nil
}
