// Package config gathers the settings of symmem in one plain struct, [Config]. It knows their names, forms and bounds. Which backends, devices and
// launchers exist is left to the packages that use the settings.
//
// # Where a value comes from
//
// For each key, [Load] takes the first of these that has a value:
//
//  1. the program: [LoadOptions].Explicit
//  2. a flag that [AddFlags] added and the user set: --world-size
//  3. the environment: SYMMEM_WORLD_SIZE
//  4. the configuration file: world-size
//  5. the default: [Default]
//
// [Config.Source] returns which one it was. [Keys] lists every key with its flag, variable and default. The zero [Config] stands for what Load finds
// without options.
//
// # The environment
//
// An environment variable that is empty, or blank, counts as unset, for every key. A variable that begins with SYMMEM_ and is no key is an error that names the
// nearest right one, so that a typing error is never ignored. These are not keys, and are allowed: SYMMEM_CONFIG (the path of the configuration
// file), SYMMEM_CUDA_LIBRARY (the file of the CUDA driver), all that begin with SYMMEM_TEST_, the variables that Kubernetes makes for a service
// called symmem (SYMMEM_SERVICE_HOST, SYMMEM_PORT_29500_TCP), and those of this module's own backends that are not in the program
// (SYMMEM_NCCL_LIBRARY), since they are for all programs of a machine.
//
// # Options of backends
//
// What only one backend knows is an option of that backend, which declares it when its package is imported. Its key has the backend's name before its
// own: nccl-window in the file, --nccl-window as a flag, SYMMEM_NCCL_WINDOW as a variable. [Keys] lists it with the settings, and
// [Config].BackendOptions has those that were set. A value is text, which is checked as the backend has declared; an empty one counts as not given.
// An option of a backend that is not in the program is an error that says to import its package.
//
// # The file
//
// The file is YAML (JSON is YAML too) with the keys at its top, in any case: "world-size: 8". It is symmem.yaml in the working
// directory if there is one that this process may see, or the file that [LoadOptions].File, --config or SYMMEM_CONFIG names, which must then exist. It
// must be a regular file of at most one mebibyte. A key that is not known is an error, a key without a value counts as unset. Behind the
// key of a secret there has to be a text: what YAML takes for nothing may have been the secret, as behind "#".
//
// A file says which libraries are loaded and whom the process meets. So a symmem.yaml that nobody has named must belong to this user or to root, and
// no other user may write it; a file of this user may be writable by this user's own group. A link to it must belong to one of the two as well. Any other
// is an error, so that a file which someone has put into a shared directory is not obeyed. A file that was named is read whoever owns it. Where
// files have no such owners (Windows), the check does not apply.
//
// # Forms
//
// A list is a YAML list or names with commas between them. A duration needs its unit ("90s", "2m"). Whole numbers are decimal: 010 is ten. Blanks around a value
// are dropped. Nothing is converted silently: 1.5 is not a rank, and 60 is not a duration.
package config
