// SPDX-License-Identifier: Apache-2.0

// Package hostimage makes the image `host`: a sandbox on this machine's own programs.
//
// /usr comes from the machine itself, bound read-only and without an id mapping, so the sandbox's root is a
// stranger to it: files only root may read stay unreadable, owners show as nobody. Everything else is a
// skeleton built here: empty directories, a list of harmless files of /etc, generated accounts, a
// writable /usr/local for pip and npm. What is not on the list is not there; a list of what to hide would
// forget something.
//
//	digest, err := hostimage.Build(dir, hostimage.Options{})   // dir/<digest> is the skeleton
//	for _, path := range hostimage.Binds() { … }               // bind read-only over it
//	// then the skeleton's own usr/local over the bound /usr
package hostimage

import (
	"fmt"
	"os"
	"regexp"
	"strings"

	"opensandbox.io/node/wire"
)

// codeInterpreter is the published image name that the quick starts use.
const codeInterpreter = "opensandbox/code-interpreter"

var tag = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)

// Resolve tells whether an image name means this image: `host`, or the published code interpreter with any
// tag and from any registry. A digest names exact content, which this is not.
func Resolve(name string) bool {
	repository, version, tagged := cutTag(name)
	if tagged && !tag.MatchString(version) {
		return false
	}
	if repository == "host" {
		return !tagged || version == "latest"
	}
	registry, rest, ok := strings.Cut(repository, "/")
	if ok && (strings.ContainsAny(registry, ".:") || registry == "localhost") {
		repository = rest
	}
	return repository == codeInterpreter
}

// cutTag splits at the colon after the last slash: one before it belongs to a registry's port.
func cutTag(name string) (repository, version string, tagged bool) {
	colon := strings.LastIndexByte(name, ':')
	if colon < 0 || colon < strings.LastIndexByte(name, '/') {
		return name, "", false
	}
	return name[:colon], name[colon+1:], true
}

// Aliases lists the names for people.
func Aliases() []wire.ImageInfo {
	return []wire.ImageInfo{
		{Name: "host", Description: "This machine's programs, read-only; a system of its own around them, writable."},
		{Name: codeInterpreter, Description: "The published name of the quick starts, any tag; the same as host."},
	}
}

// Env is the environment commands start with, before what the request asks for.
func Env() []string {
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root",
		"LANG=C.UTF-8",
		// /usr is read-only, so pip cannot break the system's packages: it writes to /usr/local.
		"PIP_BREAK_SYSTEM_PACKAGES=1",
		"PIP_ROOT_USER_ACTION=ignore",
		"PIP_DISABLE_PIP_VERSION_CHECK=1",
		// Node from NodeSource would write to /usr.
		"NPM_CONFIG_PREFIX=/usr/local",
	}
}

// Binds are the directories of this machine to bind read-only: /usr, and the old top-level ones where they are
// not links into it.
func Binds() []string { return machine{"/"}.binds() }

// Warnings are wishes of a request's environment that the image cannot fulfil: published images choose versions of
// languages by variables, here there is only what this machine has.
func Warnings(env map[string]string) []string { return machine{"/"}.warnings(env) }

func (m machine) warnings(env map[string]string) []string {
	var warnings []string
	if wanted := env["PYTHON_VERSION"]; wanted != "" {
		switch have := m.python(); {
		case have == "":
			warnings = append(warnings, fmt.Sprintf("PYTHON_VERSION is %.20q, but this machine has no Python in /usr.", wanted))
		case wanted != have && !strings.HasPrefix(wanted, have+"."):
			warnings = append(warnings, fmt.Sprintf("PYTHON_VERSION is %.20q, but this machine has Python %s.", wanted, have))
		}
	}
	for _, language := range []struct{ variable, name, program string }{
		{"NODE_VERSION", "Node.js", "usr/bin/node"},
		{"JAVA_VERSION", "Java", "usr/bin/java"},
		{"GO_VERSION", "Go", "usr/bin/go"},
	} {
		wanted := env[language.variable]
		if wanted == "" {
			continue
		}
		if _, err := os.Stat(m.path(language.program)); err != nil {
			warnings = append(warnings, fmt.Sprintf("%s is %.20q, but this machine has no %s in /usr.", language.variable, wanted, language.name))
		} else {
			warnings = append(warnings, fmt.Sprintf("%s is %.20q; the sandbox has the %s of this machine, whatever its version.", language.variable, wanted, language.name))
		}
	}
	return warnings
}
