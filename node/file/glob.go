// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// pattern is a compiled glob for one name: * and ** match any text, ? one character, [a-z] and [!a-z] classes,
// {a,b} either, \ takes the next character as it is.
type pattern struct{ choices [][]token }

type token struct {
	kind    byte // 'c' character, '?' any one, '*' any text, '[' class
	char    rune
	ranges  []rune // pairs
	negated bool
}

const (
	maxChoices = 256 // {a,b}{c,d}… multiplies
	maxPattern = 1024
)

// compile reads a pattern. `**/` in front is allowed, because people write it, and means nothing for a single name.
func compile(text string) (*pattern, error) {
	if len(text) > maxPattern {
		return nil, fmt.Errorf("longer than %d bytes", maxPattern)
	}
	for strings.HasPrefix(text, "**/") {
		text = text[3:]
	}
	alternatives, err := braces(text)
	if err != nil {
		return nil, err
	}
	p := &pattern{}
	for _, a := range alternatives {
		tokens, err := tokenize(a)
		if err != nil {
			return nil, err
		}
		p.choices = append(p.choices, tokens)
	}
	return p, nil
}

// braces writes {a,b} out into separate patterns.
func braces(text string) ([]string, error) {
	open := -1
	depth := 0
	var commas []int
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '[':
			if end := strings.IndexByte(text[i:], ']'); end > 0 {
				i += end
			}
		case '{':
			if depth == 0 {
				open, commas = i, nil
			}
			depth++
		case ',':
			if depth == 1 {
				commas = append(commas, i)
			}
		case '}':
			if depth == 0 {
				continue
			}
			if depth--; depth > 0 {
				continue
			}
			rest, err := braces(text[i+1:])
			if err != nil {
				return nil, err
			}
			var out []string
			from := open + 1
			for _, to := range append(commas, i) {
				inner, err := braces(text[from:to])
				if err != nil {
					return nil, err
				}
				for _, a := range inner {
					for _, b := range rest {
						if out = append(out, text[:open]+a+b); len(out) > maxChoices {
							return nil, fmt.Errorf("more than %d alternatives", maxChoices)
						}
					}
				}
				from = to + 1
			}
			return out, nil
		}
	}
	if depth > 0 {
		return nil, fmt.Errorf("{ without }")
	}
	return []string{text}, nil
}

func tokenize(text string) ([]token, error) {
	var out []token
	for len(text) > 0 {
		r, size := utf8.DecodeRuneInString(text)
		text = text[size:]
		switch r {
		case '*':
			if len(out) == 0 || out[len(out)-1].kind != '*' {
				out = append(out, token{kind: '*'})
			}
		case '?':
			out = append(out, token{kind: '?'})
		case '\\':
			if text == "" {
				return nil, fmt.Errorf(`\ at the end`)
			}
			r, size = utf8.DecodeRuneInString(text)
			text = text[size:]
			out = append(out, token{kind: 'c', char: r})
		case '[':
			t, rest, err := class(text)
			if err != nil {
				return nil, err
			}
			out, text = append(out, t), rest
		default:
			out = append(out, token{kind: 'c', char: r})
		}
	}
	return out, nil
}

func class(text string) (t token, rest string, err error) {
	t.kind = '['
	if text != "" && (text[0] == '!' || text[0] == '^') {
		t.negated, text = true, text[1:]
	}
	next := func() (rune, bool) {
		text = strings.TrimPrefix(text, `\`)
		if text == "" {
			return 0, false
		}
		r, size := utf8.DecodeRuneInString(text)
		text = text[size:]
		return r, true
	}
	for first := true; ; first = false {
		if text == "" {
			return t, "", fmt.Errorf("[ without ]")
		}
		if text[0] == ']' && !first {
			return t, text[1:], nil
		}
		lo, ok := next()
		hi := lo
		if ok && len(text) > 1 && text[0] == '-' && text[1] != ']' {
			text = text[1:]
			hi, ok = next()
		}
		if !ok {
			return t, "", fmt.Errorf("[ without ]")
		}
		t.ranges = append(t.ranges, lo, hi)
	}
}

// match says whether the whole name fits.
func (p *pattern) match(name string) bool {
	for _, tokens := range p.choices {
		if matchTokens(tokens, name) {
			return true
		}
	}
	return false
}

// matchTokens goes back only to the last star, so it takes at most the product of both lengths.
func matchTokens(tokens []token, name string) bool {
	t, star, resume := 0, -1, ""
	for name != "" || t < len(tokens) {
		if t < len(tokens) && tokens[t].kind == '*' {
			star, resume = t, name
			t++
			continue
		}
		if name != "" {
			r, size := utf8.DecodeRuneInString(name)
			if t < len(tokens) && tokens[t].fits(r) {
				t++
				name = name[size:]
				continue
			}
		}
		if star < 0 || resume == "" {
			return false
		}
		_, size := utf8.DecodeRuneInString(resume)
		resume = resume[size:]
		name, t = resume, star+1
	}
	return true
}

func (t *token) fits(r rune) bool {
	switch t.kind {
	case '?':
		return true
	case '[':
		for i := 0; i < len(t.ranges); i += 2 {
			if r >= t.ranges[i] && r <= t.ranges[i+1] {
				return !t.negated
			}
		}
		return t.negated
	}
	return t.char == r
}
