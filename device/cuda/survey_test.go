package cuda

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestModuleVersion(t *testing.T) {
	old := moduleFile
	t.Cleanup(func() { moduleFile = old })
	moduleFile = filepath.Join(t.TempDir(), "version")
	assert.Empty(t, ModuleVersion())
	for text, want := range map[string]string{
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder@U22)  Tue\nGCC version:  gcc version 12.3.0\n": "580.159.04",
		"NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n":                                                      "550.54.14",
		"something else\n": "",
	} {
		require.NoError(t, os.WriteFile(moduleFile, []byte(text), 0o600))
		assert.Equal(t, want, ModuleVersion())
	}
	assert.Equal(t, "12.4", VersionText(12040))
}
